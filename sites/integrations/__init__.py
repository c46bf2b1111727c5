"""Adapters for frameworks that bring a training loop of their own: docs/frameworks.md."""
