"""Room ``planning``: memory and traffic of a rank, from names, shapes and dtypes, before any allocation."""
