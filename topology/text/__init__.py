"""The YAML reader: plain values with their places, and every mistake told at its place."""
