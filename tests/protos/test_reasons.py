"""An exception becomes a message that somebody can act on, whatever its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.protos.failure import MESSAGE_CHARS, reason_of, text_of


class Unprintable(Exception):  # noqa: N818 - as a library might call it
    """Its text is its key."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("weight"), "KeyError: 'weight', in lookup, protos/test_reasons.py:"),
        (KeyError(type), "KeyError: <class 'type'>, in lookup, protos/test_reasons.py:"),
        (TimeoutError(), "TimeoutError, in lookup, protos/test_reasons.py:"),
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
    is_sentence = not isinstance(error, KeyError) and len(str(error).split()) > 1
    assert text_of(raised.value) == (str(error) if is_sentence else reason_of(raised.value))


def test_what_was_never_raised_has_no_place() -> None:
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert len(reason_of(ValueError("much " * 500))) == MESSAGE_CHARS


ROOT = Path(__file__).resolve().parents[2]
WITHOUT_SENTENCES = {
    *("AssertionError", "AttributeError", "BaseException", "Exception", "ImportError"),
    *("IndexError", "KeyError", "LookupError", "MemoryError", "OSError", "StopIteration"),
    *("TimeoutError", "TypeError"),
}
"""Exceptions that Python and libraries raise with a key as their text, or with none."""


def formatted(tree: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yield where an exception of that name becomes a text as it is."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=found)]) if found == name:
                yield node
            case ast.FormattedValue(value=ast.Name(id=found)) if found == name:
                yield node


@pytest.mark.parametrize("folder", ["orchestrator", "protos", "sites"])
def test_what_may_be_no_sentence_becomes_a_text_in_one_place_only(folder: str) -> None:
    """Elsewhere by `text_of` and `reason_of`."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for handler in ast.walk(ast.parse(path.read_text())):
            if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
                continue
            kinds = {
                each.id for each in ast.walk(handler.type or handler) if isinstance(each, ast.Name)
            }
            if kinds & WITHOUT_SENTENCES:
                found += [f"{where}:{each.lineno}" for each in formatted(handler, handler.name)]
    assert not found
