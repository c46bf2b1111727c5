"""A node's supervisor, with tests.fakes.agent_gateway in place of the gateway."""

import sys

import sites.node.gateway_process
from sites.node.__main__ import main

if __name__ == "__main__":
    sites.node.gateway_process.MODULE = "tests.fakes.agent_gateway"
    sys.exit(main())
