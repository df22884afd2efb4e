"""``everybit audit``: where a run lost precision, from what :class:`everybit_torch.Audit` saved."""
