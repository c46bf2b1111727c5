"""The contract between gateways."""
