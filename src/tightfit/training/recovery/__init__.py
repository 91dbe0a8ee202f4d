"""Out of memory in the middle of a training step: the step undone, or its update finished, bit for bit."""
