"""The agent, with tests.fakes.agent_gateway in place of the gateway."""

import sys

import sites.agent.site_gateways
from sites.agent.__main__ import main

if __name__ == "__main__":
    sites.agent.site_gateways.MODULE = "tests.fakes.agent_gateway"
    sys.exit(main())
