"""What is stepped at once: a tensor, its state, and the places of its elements in the model."""
