"""A run's state between sites: a checkpoint of one is fetched by another that comes back."""
