"""The gateway: owns every WAN connection of the ranks that it serves."""
