"""The agent, which says that it may use sixteen cores."""

import sys

import isthmus.sites.agent.__main__ as agent

if __name__ == "__main__":
    agent.usable_cores = lambda: 16
    sys.exit(agent.main())
