"""Buckets, chunk by chunk: which are summed when, and what is done to their bytes."""
