"""The control plane: coordinator, command line, emulator."""
