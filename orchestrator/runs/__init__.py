"""A run as its files tell it: who reads one of them, and the figures that every view shows."""
