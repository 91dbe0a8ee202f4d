"""Simulates a CUDA device with CPU tensors: the operators that PyTorch calls there, and the memory they allocate."""

from tightfit.tracing.cuda.role import CudaRole

__all__ = ["CudaRole"]
