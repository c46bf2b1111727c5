"""What a run or a benchmark measured, in memory and on disk: read once, shown by all."""
