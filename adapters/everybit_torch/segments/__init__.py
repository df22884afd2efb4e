"""Segments: a tensor that is stepped at once, its state, and the places of its elements in the model."""
