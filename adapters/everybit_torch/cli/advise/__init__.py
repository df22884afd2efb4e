"""``everybit advise``: which policy and strategy fit into the memory that there is."""
