"""Decisions of the control plane: pure state machines, no I/O."""
