"""Names of these optimizers in other programs, each by one import; a module is imported where its program is installed."""
