"""Benchmarks: one job run in many settings, alone and together, and what follows from the times."""
