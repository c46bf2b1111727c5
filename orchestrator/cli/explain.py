"""`isthmus explain`: what an error code or an exit status means, and what to do."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Mapping, Sequence

import click
from click.shell_completion import CompletionItem

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.documented import error_texts, status_texts
from isthmus.orchestrator.cli.options import with_output
from isthmus.orchestrator.cli.output import Output
from isthmus.protos.catalogue import CATALOGUE

WIDTH = 80
_LIST = re.compile(r"\d+\. ")


def _offered(_context: click.Context, _argument: object, begun: str) -> list[CompletionItem]:
    """Complete a code."""
    return [
        CompletionItem(code, help=entry.message)
        for code, entry in CATALOGUE.items()
        if code.startswith(begun.upper())
    ]


@click.command("explain")
@click.argument("name", metavar="[CODE]", required=False, default="", shell_complete=_offered)
@with_output
def command(output: Output, name: str) -> int:
    """Print what an error CODE or an exit status means, and what to do; without one, list all."""
    if not name:
        return _all(output)
    if name.isdecimal():
        return _status(output, int(name))
    code = name.strip().upper().replace("-", "_")
    if code not in CATALOGUE:
        raise _unknown(name, difflib.get_close_matches(code, CATALOGUE, n=1))
    entry, text = CATALOGUE[code], error_texts()[code]
    data = {
        "code": code,
        "exit_code": int(entry.exit_code),
        "message": entry.message,
        "hint": entry.hint,
        "text": text,
        "page": entry.page,
    }
    means = status_texts()[entry.exit_code]
    shown = [
        _filled(f"{code}: {entry.message}"),
        _wrapped(text),
        _filled(f"What to do: {entry.hint}"),
    ]
    return output.result(data, "\n\n".join([*shown, _filled(f"exit {entry.exit_code}: {means}")]))


def _all(output: Output) -> int:
    statuses = status_texts()
    width = max(map(len, CATALOGUE))
    lines = [
        f"{code:<{width}}  {entry.exit_code:>2}  {entry.message}"
        for code, entry in CATALOGUE.items()
    ]
    lines += ["", *(f"exit {status:>3}  {text}" for status, text in statuses.items())]
    data = {
        "codes": [
            {"code": code, "exit_code": int(entry.exit_code), "message": entry.message}
            for code, entry in CATALOGUE.items()
        ],
        "exit_statuses": _as_list(statuses),
    }
    return output.result(data, "\n".join(lines))


def _status(output: Output, status: int) -> int:
    statuses = status_texts()
    if status not in statuses:
        close = [str(each) for each in statuses if str(each).startswith(str(status)[:2])]
        raise _unknown(str(status), close)
    codes = [code for code, entry in CATALOGUE.items() if entry.exit_code == status]
    lines = [_filled(f"exit {status}: {statuses[status]}")]
    lines += [f"  {code}: {CATALOGUE[code].message}" for code in codes]
    data = {"exit_code": status, "text": statuses[status], "codes": codes}
    return output.result(data, "\n".join(lines))


def _as_list(statuses: Mapping[int, str]) -> list[dict[str, object]]:
    return [{"exit_code": status, "text": text} for status, text in statuses.items()]


def _unknown(name: str, close: Sequence[str]) -> CommandError:
    meant = f" (did you mean {close[0]}?)" if close else ""
    return CommandError(
        "USAGE",
        f"there is no error code or exit status {name!r}{meant}",
        {"command": "isthmus explain"},
        hint="`isthmus explain` lists them all.",
    )


def _wrapped(text: str) -> str:
    """Return paragraphs, and the items of lists, as wide as a terminal."""
    items: list[str] = []
    for line in text.splitlines():
        is_new = not line.strip() or not items or not items[-1] or _LIST.match(line)
        if is_new:
            items.append(line.strip())
        else:
            items[-1] = f"{items[-1]} {line.strip()}"
    return "\n".join(_filled(item) for item in items)


def _filled(text: str) -> str:
    indent = "   " if _LIST.match(text) else ""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
