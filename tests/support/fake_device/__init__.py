"""A device that is not there: it computes on the host, and keeps what a device with streams would keep of order and memory."""
