"""Fault scripts: what happens to a running emulation, and when."""
