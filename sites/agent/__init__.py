"""The agent: starts, watches and ends a site's processes on the coordinator's word."""
