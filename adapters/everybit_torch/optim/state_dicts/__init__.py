"""State dicts of the torch optimizer: saved, judged, loaded, in full precision, and in torch's form."""
