"""An exception becomes a message that somebody can act on, whatever its text."""

from __future__ import annotations

import pytest

from isthmus.protos.failure import MESSAGE_CHARS, reason_of


class Unprintable(Exception):  # noqa: N818 - as a library might call it
    """Its text is its key."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("weight"), "KeyError: 'weight', in lookup, protos/test_reasons.py:"),
        (KeyError(type), "KeyError: <class 'type'>"),
        (StopIteration(), "StopIteration, in lookup, protos/test_reasons.py:"),
        (AssertionError(), "AssertionError, in lookup, protos/test_reasons.py:"),
        (MemoryError(), "MemoryError, in lookup, protos/test_reasons.py:"),
        (ValueError("\n"), "ValueError, in lookup, protos/test_reasons.py:"),
        (IndexError(3), "IndexError: 3, in lookup, protos/test_reasons.py:"),
        (Unprintable("x"), "Unprintable: x, in lookup, protos/test_reasons.py:"),
        (RuntimeError("no more\nmemory"), "RuntimeError: no more memory"),
        (FileNotFoundError(2, "No such file", "x"), "FileNotFoundError: [Errno 2] No such file"),
    ],
)
def test_what_says_nothing_is_told_with_its_type_and_its_place(error: Exception, said: str) -> None:
    def lookup() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        lookup()
    assert reason_of(raised.value).startswith(said)
    assert "\n" not in reason_of(raised.value)


def test_what_was_never_raised_has_no_place() -> None:
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert len(reason_of(ValueError("much " * 500))) == MESSAGE_CHARS
