"""The coordinator's process: its service, sessions, journal, and the run that it carries out."""
