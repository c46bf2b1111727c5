"""The Python client: what scripts, notebooks and commands use to launch runs and look at them."""
