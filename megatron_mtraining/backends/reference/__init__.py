"""The reference backend: plain PyTorch on any device, against which every kernel is judged."""

from .backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
