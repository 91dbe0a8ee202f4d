"""What PyTorch and the process are doing while a step runs."""
