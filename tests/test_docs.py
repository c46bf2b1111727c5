"""The docs name files, pages and commands: each of them is there, and no line is too long.

And the site that is made of them builds without a warning.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
COLUMNS = 120
FOLDERS = ("docs", "examples", "orchestrator", "protos", "scripts", "sites", "tests", "topology")
PATH = re.compile(rf"(?<![\w/.])((?:{'|'.join(FOLDERS)})/[\w/.*-]*[\w*])")
MODULE = re.compile(r"`([\w/]+\.(?:py|proto|css))`")
PLACEHOLDER = re.compile(r"/[A-Z]{2,}")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@functools.cache
def tracked() -> frozenset[str]:
    """Return the paths of all files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return frozenset(listed.stdout.split())


def anchors_of(page: Path) -> set[str]:
    """Return what a link may name on a page: its headings, as GitHub writes them, and its ids."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    return slugs | set(re.findall(r'id="([^"]+)"', text))


def by_path(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=by_path)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=by_path)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    files = tracked()
    ends = {file.rpartition("/")[2] for file in files}
    named = {each for each in PATH.findall(text) if not PLACEHOLDER.search(each)}
    missing = [
        each for each in named if not (list(ROOT.glob(each)) or (page.parent / each).exists())
    ]
    missing += [
        each
        for each in MODULE.findall(text)
        if not ("/" in each and (ROOT / each).exists())
        and not any(file.endswith(f"/{each}") for file in files)
        and each not in ends
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=by_path)
def test_lines_are_short(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), start=1)
    assert not [
        number for number, line in lines if len(line) > COLUMNS and not line.startswith("|")
    ]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    options = ["-f", str(ROOT / ".mkdocs.yml"), "-d", str(tmp_path)]
    built = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "attach" in (tmp_path / "api.html").read_text()
