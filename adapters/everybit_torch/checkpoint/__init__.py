"""Room ``checkpoint``: files that are whole or not there, with a checksum for each piece, for any strategy and number of ranks."""
