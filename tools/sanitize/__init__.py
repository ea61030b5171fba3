"""Runs the CUDA kernels under compute-sanitizer; see run.py."""
