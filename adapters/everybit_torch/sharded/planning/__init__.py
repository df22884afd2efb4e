"""The parts of a plan: its report, the bytes of a group, peaks, and traffic. :mod:`everybit_torch.sharded.plan` puts them together."""
