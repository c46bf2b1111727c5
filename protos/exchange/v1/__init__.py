"""Version 1 of the contract between gateways: generated messages."""
