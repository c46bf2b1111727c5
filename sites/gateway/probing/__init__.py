"""A gateway of a run that only measures links."""
