"""``torch.optim.Optimizer`` over everybit's transforms: param groups, state dicts, and steps of parameters where they lie."""
