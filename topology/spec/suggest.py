"""Words for messages about mistakes: what was read, what was expected, what was probably meant."""

import difflib
from collections.abc import Iterable

_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """Return `value` as a message quotes it: short, on one line, in YAML's words."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list():
            return "a list"
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` when one of `known` is close to `word`, else nothing."""
    names = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word[:200].casefold(), names, n=1)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""


def one_of(words: Iterable[str]) -> str:
    """Return `'a', 'b' or 'c'`."""
    quoted = [repr(word) for word in words]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
