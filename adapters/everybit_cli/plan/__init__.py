"""``everybit plan``: where memory goes, for any model, policy, strategy and number of ranks, before anything is allocated."""
