"""CUDA kernels under compute-sanitizer; see run.py."""
