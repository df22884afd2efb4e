"""Room ``audit``: losses of a step to rounding, layer by layer, while training and in a checkpoint."""
