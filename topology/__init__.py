"""The world's description (topology, job, units) and what follows: costs and trees. Pure."""
