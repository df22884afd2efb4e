"""``everybit bench``: whether a step is faster and smaller here, against torch's."""
