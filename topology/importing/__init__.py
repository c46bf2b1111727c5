"""The import of network maps: formats that others write become topologies."""
