"""Kernels of attention: the protocol, the reference in plain PyTorch and the CUDA kernels, and their resolution."""
