"""What a topology need not define itself: accelerators by name, with public figures."""
