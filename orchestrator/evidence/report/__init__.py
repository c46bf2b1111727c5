"""Reports of runs and benchmarks: as a page, as Markdown, as JSON.

Read from their folders, as figures, a page, Markdown and JSON.
"""
