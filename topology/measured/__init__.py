"""Measured figures of links, and how they come into a topology."""
