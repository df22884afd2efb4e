"""Helpers of training loops: weights for evaluation, freezing, param groups, local steps, sharpness."""
