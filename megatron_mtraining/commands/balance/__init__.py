"""Replay of a recorded index over layouts, schedules and numbers of ranks: balance, bytes and predicted times."""
