"""What was measured: links as they are, and how that comes into a topology."""
