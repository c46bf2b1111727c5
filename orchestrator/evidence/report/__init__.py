"""What runs and benchmarks came to.

Read from their folders, as figures, a page, Markdown and JSON.
"""
