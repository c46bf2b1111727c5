"""How much may be on the way to a peer, how fast, and over how many connections."""
