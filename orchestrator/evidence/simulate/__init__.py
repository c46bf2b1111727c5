"""Simulated runs, kept and shown like real ones."""
