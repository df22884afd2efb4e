"""Gives a model on the meta device its values, and its memory to a stepper: a part at a time, each rank what it keeps of it."""
