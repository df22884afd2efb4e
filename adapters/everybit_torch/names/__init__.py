"""Names of these optimizers in other programs, each by one import: ``names.trainer``, ``names.timm`` and ``names.lightning``."""
