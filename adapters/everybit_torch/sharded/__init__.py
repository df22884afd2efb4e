"""Sharded training on flat buffers."""
