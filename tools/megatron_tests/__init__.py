"""Megatron-LM's own tests, unmodified, with this attention in the place of theirs: see ``__main__``."""
