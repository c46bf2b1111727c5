"""The gateway: owns every WAN connection of a node."""
