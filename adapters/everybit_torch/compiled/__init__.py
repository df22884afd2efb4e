"""A pure step as one pass over memory: compiled where that is possible, and told apart by what its code depends on."""
