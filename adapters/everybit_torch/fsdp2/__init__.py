"""Training on the rows that FSDP2 keeps of each parameter."""
