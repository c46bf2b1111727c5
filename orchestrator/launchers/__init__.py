"""Starts coordinator and agents where they belong, and keeps them: `isthmus up`."""
