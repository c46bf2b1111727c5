"""Sends a run's figures and events to other tools, in a process beside the coordinator."""
