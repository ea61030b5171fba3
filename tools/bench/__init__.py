"""Measurement of attention, selection and packing beside their peers: ``python -m tools.bench.run``."""
