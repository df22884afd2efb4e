"""Room ``planning``: what a rank keeps and sends, from names, shapes and dtypes, before anything is allocated."""
