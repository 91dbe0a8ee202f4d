"""A CUDA device played by CPU tensors: what PyTorch would call there, keep there and allocate there."""

from tightfit.tracing.cuda.role import CudaRole

__all__ = ["CudaRole"]
