"""Maps of networks, in the formats that others write, turned into topologies."""
