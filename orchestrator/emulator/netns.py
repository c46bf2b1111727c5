"""The packet emulator as a child process: `python -m orchestrator.emulator.netns`.

It reads one line of JSON (netns_config.py) from stdin, makes a network namespace for each site,
says on stdout how to enter them, then once a second what has passed. Further lines of stdin change
links. It ends when stdin does, so with its parent too, and the namespaces end with it.

Exit status 2 and one line on stderr: the configuration is wrong, or this machine does not allow it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from typing import Any

from orchestrator.emulator.namespaces import NetnsError, enter_new_network, own_user_namespace
from orchestrator.emulator.netns_config import NetnsConfig, parse_changes
from orchestrator.emulator.netns_router import Router, Site
from orchestrator.emulator.pipes import CONFIGURED_WITHIN_S, Conversation, LineReader
from orchestrator.emulator.punctual import be_punctual
from orchestrator.emulator.tun import address_of, open_site
from topology.errors import ConfigError


def main() -> int:
    """Run the emulator until stdin ends; return the exit status."""
    try:
        _serve()
    except ConfigError as error:
        return _complain(2, f"configuration: {error.problems[0].message}")
    except NetnsError as error:
        return _complain(2, str(error))
    except BrokenPipeError:  # whoever read our messages has gone, and so do we
        return 0
    except OSError as error:
        return _complain(1, f"a site's device is gone: {error.strerror}")
    except KeyboardInterrupt:
        return 130
    return 0


def _complain(status: int, text: str) -> int:
    sys.stderr.write(f"netns: {text}\n")
    return status


def _serve() -> None:
    stdin = LineReader(sys.stdin.fileno())
    config = NetnsConfig.from_line(stdin.wait_line(CONFIGURED_WITHIN_S))
    with contextlib.ExitStack() as stack:
        sites, ready = _make_sites(config, stack)
        be_punctual()
        gc.disable()  # nothing here refers to itself, and a collection is a pause
        router = Router(sites, config.links, config.seed)

        def obey(line: bytes) -> int:
            changes = parse_changes(line, config.links)
            router.apply(changes)
            return len(changes)

        owner = Conversation(stdin, sys.stdout.fileno(), obey, router.counters)
        owner.begin(ready, time.monotonic())
        while not stdin.has_ended:
            if router.run(owner.turn(time.monotonic()), stdin.descriptor):
                stdin.read()
        owner.end()


def _make_sites(
    config: NetnsConfig, stack: contextlib.ExitStack
) -> tuple[list[Site], dict[str, Any]]:
    """Return the sites and the `ready` message; what they hold is closed with `stack`."""
    own = f"/proc/{os.getpid()}"
    user = f"{own}/ns/user" if own_user_namespace() else ""
    sites, told = [], []
    for index, name in enumerate(config.sites):
        namespace = enter_new_network()
        stack.callback(os.close, namespace)
        device = open_site(index)
        stack.callback(os.close, device)
        address = address_of(index)
        sites.append(Site(name, address, device))
        told.append(
            {"site": name, "address": address, "net": f"{own}/fd/{namespace}", "user": user}
        )
    return sites, {"op": "ready", "sites": told}


if __name__ == "__main__":
    sys.exit(main())
