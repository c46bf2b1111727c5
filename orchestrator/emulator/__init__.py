"""A WAN on one machine: a user-space TCP relay with rate, delay and jitter for each direction."""
