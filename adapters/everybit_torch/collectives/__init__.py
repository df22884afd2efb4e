"""Collectives over ranks: groups, sums, and the numbers that are sent. Knows neither models nor optimizers."""
