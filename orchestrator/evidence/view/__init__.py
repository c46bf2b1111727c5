"""What people see of a run: the live table, one plain line, the summary at its end. Pure."""
