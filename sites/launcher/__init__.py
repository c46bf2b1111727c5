"""Starts the ranks of one node: torchrun's driver, and what torchrun starts."""
