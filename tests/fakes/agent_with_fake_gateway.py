"""The agent, with tests.fakes.agent_gateway in place of the gateway."""

import os
import sys

import sites.agent.site_gateways
from sites.agent.__main__ import main
from tests.fakes.unmeasured import unmeasured

if __name__ == "__main__":
    sites.agent.site_gateways.MODULE = "tests.fakes.agent_gateway"
    # The agent is measured, its children are not: torch takes them half as long again to import
    # then, and test_launcher.py runs their lines.
    for name in os.environ.keys() - unmeasured(os.environ).keys():
        del os.environ[name]
    sys.exit(main())
