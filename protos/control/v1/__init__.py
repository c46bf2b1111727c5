"""Version 1 of the contract between coordinator, agents and clients: generated messages."""
