"""Helpers of the tests of this package, and of those who build on it: an oracle, error budgets, ranks as threads."""
