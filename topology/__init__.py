"""What the world looks like: topology and job, units, costs, reduction trees. Pure."""
