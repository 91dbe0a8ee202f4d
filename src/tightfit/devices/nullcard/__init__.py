"""The null card: PyTorch's own CUDA build on a CUDA runtime that computes nothing.

Device memory is host memory that is reserved and not touched, copies and fills are real, kernels are not run. PyTorch's
allocator, its operators' host code, autocast, optimizers and streams are its own, so what
`torch.cuda.max_memory_allocated()` says is a measurement.
`python -m tightfit.devices.nullcard rtx4090 -- python train.py` runs a command on such a card. It takes Linux, a C
compiler and PyTorch's ordinary CUDA wheel; no card, no driver, no CUDA toolkit.
"""
