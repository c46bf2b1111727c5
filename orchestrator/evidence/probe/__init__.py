"""What a probe asks of the gateways, and what becomes of their figures."""
