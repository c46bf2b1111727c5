"""The operator's side: calls to a coordinator, and where each run's coordinator is."""
