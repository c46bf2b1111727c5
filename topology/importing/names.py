"""Any text into the name of a site: letters, digits and hyphens, and each name only once."""

import re
import unicodedata
from collections.abc import Iterable

_NAME_CHARACTERS = 63
_SUFFIX_CHARACTERS = 6


def plain(text: str) -> str:
    """Return a text in lower case without accents, hyphens between its words; perhaps an empty one.

    `São Paulo, BR` becomes `sao-paulo-br`.
    """
    bare = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", bare).strip("-")


def unique_names(texts: Iterable[str]) -> list[str]:
    """Return a valid name for each text, in order; the second `Paris` becomes `paris-2`."""
    names: list[str] = []
    taken: set[str] = set()
    for text in texts:
        base = plain(text)[: _NAME_CHARACTERS - _SUFFIX_CHARACTERS].strip("-") or "site"
        name, count = base, 1
        while name in taken:
            count += 1
            name = f"{base}-{count}"
        taken.add(name)
        names.append(name)
    return names
