"""`isthmus man`: the manual page, made of what --help says of every command."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

import click

from isthmus.orchestrator.cli.main import PROGRAM, cli
from isthmus.orchestrator.cli.options import with_output
from isthmus.orchestrator.cli.output import Output
from isthmus.protos.versions import build


@click.command("man")
@with_output
def command(output: Output) -> int:
    """Print the manual page of all commands, for man.

    \b
    isthmus man | man -l -
    isthmus man > ~/.local/share/man/man1/isthmus.1
    """  # noqa: D301 - click wants the control character itself
    root = click.Context(cli, info_name=PROGRAM)
    lines = [
        f'.TH "{PROGRAM.upper()}" "1" "" "{PROGRAM} {build()}"',
        *(".SH NAME", rf"{PROGRAM} \- {_text(cli.get_short_help_str(1000))}"),
        *(".SH SYNOPSIS", rf"\fB{PROGRAM}\fR {_text(' '.join(cli.collect_usage_pieces(root)))}"),
        *(".SH OPTIONS", *_options(root)),
        *(".SH COMMANDS", *_commands(root)),
        *(".SH EXIT STATUS", _text((cli.epilog or "").removeprefix("Exit status: "))),
    ]
    page = "\n".join(lines)
    return output.result({"page": page}, page)


def _commands(group: click.Context) -> Iterator[str]:
    """Yield the lines of a group's commands, and of theirs."""
    assert isinstance(group.command, click.Group)
    for name in group.command.list_commands(group):
        found = group.command.get_command(group, name)
        assert found is not None, "it is listed"
        context = click.Context(found, info_name=name, parent=group)
        if isinstance(found, click.Group):
            yield from _commands(context)
            continue
        usage = " ".join(found.collect_usage_pieces(context))
        yield rf".SS \fB{_text(context.command_path)}\fR {_text(usage)}"
        for paragraph in cleandoc(found.help or "").split("\n\n"):
            is_as_written = paragraph.startswith("\b")
            yield ".PP"
            yield from [".nf"] if is_as_written else []
            yield _text(paragraph.removeprefix("\b\n"))
            yield from [".fi"] if is_as_written else []
        yield from _options(context)


def _options(context: click.Context) -> Iterator[str]:
    for parameter in context.command.get_params(context):
        names, what = parameter.get_help_record(context) or ("", "")
        if what:
            yield from (".TP", rf"\fB{_text(names)}\fR", _text(what))


def _text(text: str) -> str:
    """Return text in which nothing is a request or an escape of roff's."""
    lines = text.replace("\\", r"\e").replace("-", r"\-").splitlines()
    return "\n".join(rf"\&{line}" if line.startswith((".", "'")) else line for line in lines)
