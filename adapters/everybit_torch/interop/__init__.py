"""Room ``interop``: weights and states of other programs, and for them."""
