"""everybit_torch."""
