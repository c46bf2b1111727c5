"""YAML as plain values with their places, and every mistake said at its place."""
