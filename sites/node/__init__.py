"""One machine of a site: its gateways, its torchrun and their logs, under one supervisor."""
