"""The closed forms for the time of a step and of its exchange. Pure."""
