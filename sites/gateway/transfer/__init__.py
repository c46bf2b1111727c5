"""A run's state between sites: one that enters takes it over from all others at once."""
