"""The WAN: frames to and from other sites' gateways, over how many connections, and how fast."""
