"""The contract between coordinator, agents and clients."""
