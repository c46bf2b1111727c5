"""The agent, with tests.fakes.agent_gateway in place of the gateway."""

import sys

import sites.agent.node_launch
import sites.node.gateway_process
from sites.agent.__main__ import main

if __name__ == "__main__":
    sites.node.gateway_process.MODULE = "tests.fakes.agent_gateway"
    sites.agent.node_launch.MODULE = "tests.fakes.node_with_fake_gateway"
    sys.exit(main())
