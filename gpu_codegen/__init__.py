"""Code for GPUs, made and checked without one: ``make gpu-codegen``."""
