"""The files of a run: where they lie, who writes them, how they are read."""
