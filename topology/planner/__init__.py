"""The planner: from a job and a topology to what runs where, how gradients cross, and why. Pure."""
