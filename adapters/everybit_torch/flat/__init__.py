"""Room ``flat``: models of which every rank has all weights, in flat buffers that ranks share out."""
