"""The agent, with tests.fakes.agent_gateway in place of the gateway."""

import sys

import isthmus.sites.agent.node_launch
import isthmus.sites.node.gateway_process
from isthmus.sites.agent.__main__ import main

if __name__ == "__main__":
    isthmus.sites.node.gateway_process.MODULE = "tests.fakes.agent_gateway"
    isthmus.sites.agent.node_launch.MODULE = "tests.fakes.node_with_fake_gateway"
    sys.exit(main())
