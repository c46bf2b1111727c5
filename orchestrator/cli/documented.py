"""What the documentation says of error codes and exit statuses: docs/errors.md and docs/cli.md.

The package has both pages: pages/ has links to them, which a wheel has as files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_PAGES = Path(__file__).with_name("pages")
_SECTION = re.compile(
    r'^### <a id="[a-z-]+"></a>(?P<code>[A-Z_]+)\nExit \d+\. (?P<text>.+?)(?=\n##|\Z)',
    re.MULTILINE | re.DOTALL,
)
_STATUS = re.compile(r"^\| (?P<statuses>\d[\d, ]*) \| (?P<text>.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^]]+)\]\(([^)\s]+)\)")


def error_texts() -> Mapping[str, str]:
    """Return what the page of errors says of each code, its paragraphs as it has them."""
    page = (_PAGES / "errors.md").read_text(encoding="utf-8")
    return {match["code"]: _plain(match["text"]) for match in _SECTION.finditer(page)}


def status_texts() -> Mapping[int, str]:
    """Return what the command line's page says of each exit status."""
    page = (_PAGES / "cli.md").read_text(encoding="utf-8")
    return {
        int(status): _plain(match["text"])
        for match in _STATUS.finditer(page)
        for status in match["statuses"].split(",")
    }


def _plain(text: str) -> str:
    """Return Markdown as a terminal shows it: of a link its words and its page."""
    return _LINK.sub(_words, text.strip()).replace("**", "").replace("`", "")


def _words(link: re.Match[str]) -> str:
    words, target = " ".join(link[1].split()), link[2]
    if target.startswith("#"):
        return words
    return words if words == target else f"{words} (docs/{target})"
