"""What a script does that cannot be right: found, and refused by name."""
