"""Training: from a configuration to a folder with the weights, the plan and what was measured."""
