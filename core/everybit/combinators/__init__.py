"""Combinators: transforms that are made of other transforms."""
