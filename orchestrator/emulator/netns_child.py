"""Starts the packet emulator as a child process and makes sure that it ends.

For tests and scripts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from orchestrator.emulator.backend import SiteNamespace, parse_ready
from orchestrator.emulator.child import EmulatorProcess, started
from orchestrator.emulator.netns_config import NetnsConfig


class NetnsProcess(EmulatorProcess):
    """A packet emulator that runs.

    Attributes:
        sites: How each is reached and entered.
    """

    sites: Mapping[str, SiteNamespace] = MappingProxyType({})


@contextlib.contextmanager
def running_netns(config: NetnsConfig) -> Iterator[NetnsProcess]:
    """Run a packet emulator in a process of its own; it has ended when the block has.

    Raises:
        ConfigError: it refuses its configuration, or this machine refuses it; in its own words.
        TimeoutError: it is not ready in time.
    """
    with started("orchestrator.emulator.netns", NetnsProcess) as emulator:
        ready = parse_ready(emulator.configure(config.to_json()))
        emulator.sites = {site.site: site for site in ready}
        yield emulator
