"""Rates of a machine, measured: what planner, replay and ``auto`` take times from."""
