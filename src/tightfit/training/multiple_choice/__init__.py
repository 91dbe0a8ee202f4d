"""Multiple-choice questions, answered by the log-likelihood of each choice, in a planned memory."""
