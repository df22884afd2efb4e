"""The checks of the battery, by theme; :mod:`everybit.testing` has their names."""
