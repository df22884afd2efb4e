"""Room ``audit``: what a step loses to rounding, layer by layer, while training and in a checkpoint."""
