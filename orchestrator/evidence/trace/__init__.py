"""A run as trace events, for Perfetto and chrome://tracing."""
