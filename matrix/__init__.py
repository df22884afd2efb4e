"""Runs the tests on every version of torch that is claimed: ``make matrix``."""
