"""`python -m isthmus.sites.facts`: tells what this machine is like, as JSON.

Without arguments it prints an Answer with Facts, and ends. With `--serve` it answers a Question a
line until stdin ends (topology/spec/machine_facts.py); so one process can be asked anything that
takes two machines.

With `--at HOST` it is another machine of the same site that answers, by ssh, as its agent starts
that machine's supervisor.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from isthmus.protos.failure import reason_of, text_of
from isthmus.protos.own_processes import own_command
from isthmus.sites.agent.node_launch import over_ssh
from isthmus.sites.facts.machine import collect
from isthmus.sites.facts.paths import Echo, reach
from isthmus.topology.spec import machine_facts
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.machine_facts import Answer, Question

_QUESTIONS: Kinds[Question] = Kinds("doctor to machine", Question, on_unknown=lambda _: None)


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
        _write(_answer(machine_facts.AskFacts(), []))
        return 0
    echoes: list[Echo] = []
    for line in sys.stdin.buffer:
        try:
            _write(_answer(_QUESTIONS.read(line), echoes))
        except (OSError, ConfigError) as error:
            _write(Answer(problem=text_of(error)))
        except ValueError as error:
            _write(Answer(problem=reason_of(error)))
    return 0


def _answer(asked: Question, echoes: list[Echo]) -> Answer:
    match asked:
        case machine_facts.AskFacts():
            return Answer(result=to_json(collect(asked.wanted)))
        case machine_facts.AskClock():
            return Answer(result=time.time())
        case machine_facts.AskListen(ports=ports):
            echoes.append(Echo(asked.host, (ports.first, ports.last) if ports else (0, 0)))
            return Answer(result=echoes[-1].port)
        case machine_facts.AskReach():
            return Answer(result=reach(asked.source, asked.host, asked.port, asked.within_s))
        case machine_facts.AskBurnIn():
            from isthmus.sites.facts.burn_in import burn_in  # brings torch

            return Answer(result=[*map(to_json, burn_in(asked.for_s))])


def _write(answer: Answer) -> None:
    sys.stdout.buffer.write(line_of(answer))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
