"""Entry of `isthmus`. A command's module is imported when the command is used: --help is quick."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, shell_complete

from isthmus.orchestrator.cli.command_errors import describe
from isthmus.orchestrator.cli.output import CLOSED_PIPE, Output, discard_streams
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.protos.catalogue import ExitCode

# Read when grpc is imported: what it says of a connection beside that, we say in words.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

PROGRAM = "isthmus"
COMPLETE_VARIABLE = "_ISTHMUS_COMPLETE"

COMMANDS = {
    "init": "Write a commented topology.yaml and job.yaml that run as they are.",
    "validate": "Check topology and job files; show every mistake at its line.",
    "topology": "Import maps of networks; show a topology, the presets, and known accelerators.",
    "plan": "Decide where a job runs and how its gradients cross, and say why.",
    "doctor": "Find what would make a run on TOPOLOGY fail or slow down, and how to fix it.",
    "probe": "Measure every link of TOPOLOGY, each direction, between the sites' gateways.",
    "up": "Start TOPOLOGY's coordinator and all agents, and keep them running.",
    "down": "Stop what `up` started.",
    "launch": "Start a job at all sites and follow it; Ctrl-C detaches.",
    "run": "Train a script at several sites on this machine, without YAML.",
    "status": "Show a run, or with --all the list of runs.",
    "runs": "List, remove and prune the runs that this machine keeps.",
    "queue": "List a coordinator's running and queued runs, and their sites.",
    "logs": "Print what the ranks, gateways and agents of a run wrote.",
    "events": "Print a run's events.",
    "wait": "Wait until a run ends; exit with its outcome.",
    "cancel": "Stop a run at all sites.",
    "sites": "Drop a site from a running run, or add one.",
    "checkpoints": "List, verify and export a run's checkpoints.",
    "emulate": "Emulate the WAN of a topology by itself; enter, change and check it.",
    "report": "Write a page about runs and benchmarks, by default about the latest run.",
    "dashboard": "Show runs in a browser, live, until Ctrl-C.",
    "trace": "Write a run as trace events, for Perfetto and chrome://tracing.",
    "bench": "Measure scaling efficiency, the exchange by itself, or how long a failure stalls others.",
    "simulate": "Simulate a job on its topology, without running anything.",
    "certs": "Make, renew and show certificates for mutual TLS.",
    "coordinator": "Run a coordinator here, for agents that dial in.",
    "agent": "Run the agent of one site here.",
    "render": "Write the files with which Slurm or Kubernetes starts a topology's sites.",
    "explain": "Explain an error code or an exit status, and what to do.",
    "completion": "Print the completion script of a shell.",
    "man": "Print the manual page of all commands, for man.",
}
"""The commands, in the order of --help."""

_MODULES = {
    "run_commands": ("status", "logs", "events", "wait", "cancel"),
    "document_commands": ("validate", "plan"),
    "launch": ("run",),
    "process_commands": ("coordinator", "agent"),
    "topology_commands": ("init", "topology"),
}
"""Modules that hold commands under their own names. Every other command is a module's `command`."""
_PLACES = {name: (module, name) for module, names in _MODULES.items() for name in names}


class LazyGroup(click.Group):
    """A group that knows its commands' names and lines, and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of --help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = _PLACES.get(cmd_name, (cmd_name, "command"))
        found = getattr(importlib.import_module(f"isthmus.orchestrator.cli.{module}"), attribute)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, and tell the output its name before its own arguments are read."""
        name, found, rest = super().resolve_command(ctx, args)
        if isinstance(ctx.obj, Output) and name is not None:
            ctx.obj.command = name
        return name, found, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands without importing them: somebody waits with a finger on the key."""
        commands = [
            CompletionItem(name, help=line)
            for name, line in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from isthmus.protos.versions import build

        click.echo(f"{PROGRAM} {build()}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=f"Exit status: {', '.join(f'{code:d} {code.words}' for code in ExitCode)}, "
    "130 interrupted, 143 terminated. Every command takes --json.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
def cli() -> None:
    """Train one model in several data centers, joined by narrow links."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit status. Nothing is raised.

    Args:
        arguments: Of the command line; None: this program's.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    output = Output.of(given)
    try:
        with INTERRUPTION.listening(is_program=arguments is None):
            return _guarded(given, output)
    except BrokenPipeError:
        discard_streams()
        return CLOSED_PIPE
    except KeyboardInterrupt as error:  # while something else was being answered
        return INTERRUPTION.answer(error)


def _guarded(arguments: list[str], output: Output) -> int:
    try:
        INTERRUPTION.check()
        return _dispatch(arguments, output)
    except click.exceptions.Exit as done:  # --help, --version
        return done.exit_code
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as error:
        return output.interrupted(INTERRUPTION.answer(error))
    except Exception as error:  # noqa: BLE001 - the root: each becomes one line and an exit status
        if INTERRUPTION.raised is not None:  # an import, say, has made its own error of that
            return output.interrupted(INTERRUPTION.answer(INTERRUPTION.raised))
        return output.failed(describe(error))


def _dispatch(arguments: list[str], output: Output) -> int:
    instruction = os.environ.get(COMPLETE_VARIABLE)
    if instruction:
        return shell_complete(cli, {}, PROGRAM, COMPLETE_VARIABLE, instruction)
    with cli.make_context(PROGRAM, arguments, obj=output) as context:
        code: Any = cli.invoke(context)
    assert isinstance(code, int), "a command returns its exit status"
    return code


if __name__ == "__main__":
    sys.exit(main())
