"""What the two ends of the Unix socket between a rank and its gateway agree on; without torch."""
