"""What would fail a run, or slow it down, found before it starts: facts in, findings out."""
