"""One transform per module: state, formula, ``init``, ``update``."""
