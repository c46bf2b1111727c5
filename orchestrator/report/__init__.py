"""What runs and benchmarks came to: read from their folders, as figures, a page, Markdown and JSON."""
