"""The gateway's ranks: their socket, their shared memory, and what they encode themselves."""
