"""Transforms made of transforms."""
