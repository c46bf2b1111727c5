"""The WAN: frames to and from the gateways of other sites, over how many connections, and how fast."""
