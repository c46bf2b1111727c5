"""The manual page has every command with its options, and man takes it without a warning."""

import shutil
import subprocess
from collections.abc import Iterator

import click
import pytest

from isthmus.orchestrator.cli.main import cli
from isthmus.protos.versions import build
from tests.cli.conftest import Isthmus


def commands(context: click.Context) -> Iterator[click.Context]:
    """Yield each command that has no commands of its own."""
    if not isinstance(context.command, click.Group):
        yield context
        return
    for name in context.command.list_commands(context):
        found = context.command.get_command(context, name)
        assert found is not None
        yield from commands(click.Context(found, info_name=name, parent=context))


def test_the_manual_page_has_each_command_with_its_options(isthmus: Isthmus) -> None:
    page = isthmus("man").out
    assert page == isthmus("man", "--json").envelope["data"]["page"] + "\n"
    assert page.startswith(f'.TH "ISTHMUS" "1" "" "isthmus {build()}"\n')
    plain = page.replace(r"\-", "-").replace(r"\fB", "").replace(r"\fR", "")
    _, *sections = plain.split("\n.SS ")
    for context, section in zip(
        commands(click.Context(cli, info_name="isthmus")), sections, strict=True
    ):
        assert section.startswith(context.command_path)
        for parameter in context.command.get_params(context):
            names, what = parameter.get_help_record(context) or ("", "")
            assert not what or f"\n.TP\n{names}\n" in section, context.command_path


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff")
def test_the_manual_page_is_good_roff(isthmus: Isthmus) -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-Kutf8", "-ww", "-Wbreak"],
        input=isthmus("man").out,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    assert "isthmus man | man" in done.stdout
