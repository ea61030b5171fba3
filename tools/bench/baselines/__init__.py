"""Baselines; importing this package registers all of them, ours first."""

from . import ours, sdpa, transformer_engine, flash4, flex, composite  # noqa: F401, I001  (the order of the tables)
