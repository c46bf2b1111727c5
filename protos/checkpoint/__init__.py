"""Checkpoints as they lie in storage: what ranks write and commands read."""
