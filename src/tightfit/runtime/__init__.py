"""The state of PyTorch and of the process while a step runs."""
