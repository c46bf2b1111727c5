"""The packet emulator as a child process: `python -m orchestrator.emulator.netns`.

It reads one line of JSON (netns_config.py) from stdin, makes a network namespace for each site,
says on stdout how to enter them, then once a second what has passed. Further lines of stdin change
links. It ends when stdin does, so with its parent too, and the namespaces end with it.

Exit status 2 and one line on stderr: the configuration is wrong, or this machine does not allow it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
from typing import Any

from orchestrator.emulator.namespaces import NetnsError, enter_new_network, own_user_namespace
from orchestrator.emulator.netns_config import NetnsConfig, parse_changes
from orchestrator.emulator.netns_router import Router, Site
from orchestrator.emulator.pipes import LineReader, MessageWriter
from orchestrator.emulator.tun import address_of, open_site
from topology.errors import ConfigError

CONFIGURED_WITHIN_S = 30.0
COUNTERS_EVERY_S = 1.0
_PR_SET_TIMERSLACK = 29  # linux/prctl.h
_REALTIME_PRIORITY = 1


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
    messages = MessageWriter(sys.stdout.fileno())
    with contextlib.ExitStack() as stack:
        sites, ready = _make_sites(config, stack)
        _be_punctual()
        router = Router(sites, config.links, config.seed)
        messages.offer(ready)
        report_s = time.monotonic() + COUNTERS_EVERY_S
        while True:
            if router.run(report_s, stdin.descriptor):
                for line in stdin.lines():
                    messages.answer(_obey(line, config, router))
                    messages.offer(router.counters())
                if stdin.has_ended:
                    return
            if time.monotonic() >= report_s:
                messages.offer(router.counters())
                report_s += COUNTERS_EVERY_S


def _obey(line: bytes, config: NetnsConfig, router: Router) -> dict[str, Any]:
    """Make the changes that a line asks for, all or none; return the answer."""
    try:
        changes = parse_changes(line, config.links)
    except ConfigError as error:
        return {"op": "refused", "message": error.problems[0].message}
    router.apply(changes)
    return {"op": "applied", "count": len(changes)}


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


def _be_punctual() -> None:
    """Ask for what keeps delays short: exact timers, precedence, and no pauses of our own.

    With all processors busy, one piece in a hundred was delivered 0.7 to 3 ms late at nice -20, and
    0.05 ms late at the lowest real-time priority. The kernel keeps a share of the time from real-time
    processes, so an emulator with too much to do cannot take the machine.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(PermissionError):  # without root it is one process among others
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_REALTIME_PRIORITY))
    gc.disable()  # nothing here refers to itself


if __name__ == "__main__":
    sys.exit(main())
