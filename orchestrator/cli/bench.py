"""`isthmus bench`: what a job reaches on its topology. Without a subcommand: `scaling`."""

from __future__ import annotations

import importlib

import click

from isthmus.orchestrator.cli.options import json_option

SUBCOMMANDS = {
    "scaling": "Run each site by itself, then all together, and divide.",
    "allreduce": "Time the exchange between sites by itself.",
    "recovery": "Let a site fail in each way, and time how long the others stall.",
}
"""The subcommand `x` is `command` in the module isthmus.orchestrator.cli.bench_x."""
DEFAULT = "scaling"


class BenchGroup(click.Group):
    """Takes `bench JOB` for `bench scaling JOB`, and imports a subcommand when it is used."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default before arguments that name no subcommand."""
        if args and args[0] not in {*SUBCOMMANDS, *ctx.help_option_names}:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of --help."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand of that name."""
        if cmd_name not in SUBCOMMANDS:
            return None
        found = importlib.import_module(f"isthmus.orchestrator.cli.bench_{cmd_name}").command
        assert isinstance(found, click.Command)
        return found


@click.group("bench", cls=BenchGroup)
@json_option
def command() -> None:
    """Measure what sites reach together, or the exchange between them by itself.

    `isthmus bench JOB` is `isthmus bench scaling JOB`.
    """
