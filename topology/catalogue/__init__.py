"""The catalogue of accelerators that ships: names with public figures, for topologies to use."""
