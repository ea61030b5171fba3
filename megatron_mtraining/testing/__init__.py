"""What the tests of this package, and of those who build on it, need: an oracle, error budgets, ranks as threads."""
