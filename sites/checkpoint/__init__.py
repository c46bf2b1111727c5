"""Checkpoints of a run: what is saved, when, how it gets to storage, and back."""
