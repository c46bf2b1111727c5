"""`python -m isthmus.sites.facts`: tells what this machine is like, as JSON.

Without arguments it prints one object, and ends. With `--serve` it answers one question a line,
each a JSON object, until stdin ends; so one process can be asked anything that takes two machines:

    {"ask": "facts", "wanted": {...}}                             -> {"facts": {...}}
    {"ask": "clock"}                                              -> {"clock_s": 1700000000.0}
    {"ask": "listen", "host": "10.0.0.5", "ports": [0, 0]}        -> {"port": 40123}
    {"ask": "reach", "source": "10.0.0.5", "host": "10.0.1.5", "port": 40123, "within_s": 3.0}
                                                                  -> {"rtt_s": 0.06, "error": null}
    {"ask": "burn_in", "for_s": 60.0}                             -> {"burned": [{...}, ...]}

With `--at HOST` it is another machine of the same site that answers, by ssh, as its agent starts
that machine's supervisor.

What cannot be done is {"error": "..."}. Fields are those of topology/spec/machine_facts.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from isthmus.protos.failure import reason_of, text_of
from isthmus.protos.own_processes import own_command
from isthmus.sites.agent.node_launch import over_ssh
from isthmus.sites.facts.machine import collect
from isthmus.sites.facts.paths import Echo, reach
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import read_json, to_json
from isthmus.topology.spec.machine_facts import Wanted


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer once, or with --serve as often as asked; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m isthmus.sites.facts", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="answer each line of stdin")
    parser.add_argument("--at", metavar="HOST", help="another machine of this site, by ssh")
    parser.add_argument("--python", default=sys.executable, help="the interpreter there")
    parser.add_argument("--option", action="append", default=[], help="of that ssh")
    options = parser.parse_args(arguments)
    if options.at is not None:
        more = ("--serve",) if options.serve else ()
        words = own_command("isthmus.sites.facts", *more, python=options.python)
        command = over_ssh(options.at, options.option, words)
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    if not options.serve:
        _write(_answer({"ask": "facts"}, []))
        return 0
    echoes: list[Echo] = []
    for line in sys.stdin:
        try:
            _write(_answer(json.loads(line), echoes))
        except (OSError, ConfigError) as error:
            _write({"error": text_of(error)})
        except (KeyError, TypeError, ValueError) as error:
            _write({"error": reason_of(error)})
    return 0


def _answer(asked: dict[str, Any], echoes: list[Echo]) -> dict[str, Any]:
    match asked["ask"]:
        case "facts":
            wanted = read_json(Wanted, asked.get("wanted", {}), on_unknown=lambda _: None)
            return {"facts": to_json(collect(wanted))}
        case "clock":
            return {"clock_s": time.time()}
        case "listen":
            first, last = asked.get("ports", (0, 0))
            echoes.append(Echo(asked["host"], (int(first), int(last))))
            return {"port": echoes[-1].port}
        case "reach":
            rtt_s, reason = reach(
                asked["source"], asked["host"], int(asked["port"]), float(asked["within_s"])
            )
            return {"rtt_s": rtt_s, "error": reason}
        case "burn_in":
            from isthmus.sites.facts.burn_in import burn_in  # brings torch

            return {"burned": [*map(to_json, burn_in(float(asked["for_s"])))]}
    raise ValueError(f"unknown question {asked['ask']!r}")


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
