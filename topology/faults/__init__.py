"""Fault scripts: what happens to an emulation that runs, and when."""
