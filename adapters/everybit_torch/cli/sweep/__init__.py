"""``everybit sweep``: several optimizers, each at the same number of learning rates, on the model of ``everybit compare``."""
