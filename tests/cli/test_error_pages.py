"""The catalogue, its page and the code are one.

Every code is documented, and is raised somewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isthmus.protos.catalogue import CATALOGUE, ExitCode

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
SECTIONS = {
    match["code"]: match
    for match in re.finditer(
        r'^### <a id="(?P<anchor>[a-z-]+)"></a>(?P<code>[A-Z_]+)\nExit (?P<exit>\d+)\. (?P<text>.+)',
        PAGE,
        re.MULTILINE,
    )
}


def test_the_page_has_exactly_the_catalogues_codes() -> None:
    assert set(SECTIONS) == set(CATALOGUE)


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_each_code_has_its_anchor_and_exit_status(code: str) -> None:
    entry, section = CATALOGUE[code], SECTIONS[code]
    assert entry.page == f"docs/errors.md#{section['anchor']}"
    assert int(section["exit"]) == entry.exit_code


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_each_code_is_used_by_the_code(code: str) -> None:
    sources = [
        path
        for package in ("orchestrator", "sites", "protos")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "catalogue.py" and "_pb2" not in path.name
    ]
    assert any(re.search(rf"[\"']{code}[\"']", path.read_text()) for path in sources)


def test_the_exit_statuses_are_those_of_the_command_lines_page() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    listed = {int(found) for found in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert listed == {int(code) for code in ExitCode}
