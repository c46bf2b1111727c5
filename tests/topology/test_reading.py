"""YAML to plain values with places.

What is read, what is refused, and that nothing else is raised.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.text import yaml_document
from isthmus.topology.text.yaml_document import (
    MAX_ALIASED_NODES,
    MAX_BYTES,
    Place,
    read_document,
)


def problems(text: str) -> list[str]:
    """Return `line:column message` of each problem of a text."""
    try:
        found = read_document(text, "t.yaml").problems
    except ConfigError as error:
        found = error.problems
    return [f"{each.line}:{each.column} {each.message}" for each in found]


PLAIN = {
    "no": "no",
    "off": "off",
    "Yes": "Yes",
    "12:30:45": "12:30:45",
    "0x10": "0x10",
    "0o10": "0o10",
    "1_000": "1_000",
    "2026-05-01": "2026-05-01",
    ".inf": ".inf",
    ".nan": ".nan",
    "1e999": "1e999",
    "=": "=",
    "true": True,
    "False": False,
    "0": 0,
    "-5": -5,
    "+3": 3,
    "1e3": 1000.0,
    "3e-3": 0.003,
    ".5": 0.5,
    "1.50": 1.5,
    "0.05": 0.05,
    "9" * 30: "9" * 30,
    "'010'": "010",
    "'true'": "true",
    '"a\\tb"': "a\tb",
}


@pytest.mark.parametrize(("written", "value"), PLAIN.items())
def test_a_scalar_is_what_it_looks_like(written: str, value: object) -> None:
    document = read_document(f"a: {written}\n", "t.yaml")
    assert document.problems == []
    read = document.get("a")
    assert (type(read), read) == (type(value), value)


REFUSED = [
    ("a: 010\n", "1:4 010 has a leading zero: write the number without it, or quote it"),
    ("a: -007\n", "1:4 -007 has a leading zero: write the number without it, or quote it"),
    ("a:\n", "1:1 'a' has no value: give it one, or remove it"),
    ("a: ~\n", "1:4 'a' has no value: give it one, or remove it"),
    ("a: [1, null]\n", "1:8 this item has no value: give it one, or remove it"),
    ("a: 1\nb: 2\na: 3\n", "3:1 duplicate key 'a' (first at line 1)"),
    ("a: {b: 1, b: 2}\n", "1:11 duplicate key 'b' (first at line 1)"),
    ("1: x\n", "1:1 a key must be a text: quote it, as '1'"),
    ("true: x\n", "1:1 a key must be a text: quote it, as 'true'"),
    ("012: x\n", "1:1 a key must be a text: quote it, as '012'"),
    ("? [a, b]\n: x\n", "1:3 a key must be a text, not a list or mapping"),
    ("{a: 1}: x\n", "1:1 a key must be a text, not a list or mapping"),
    ("a: &x {b: 1}\nc:\n  <<: *x\n", "3:3 merge keys (<<) are not supported: write the keys out"),
    ("a: !!int 3\n", "1:4 tags (!...) are not supported: write the plain value"),
    ("a: !env HOME\n", "1:4 tags (!...) are not supported: write the plain value"),
    (
        "a: !!python/object/apply:os.system [ls]\n",
        "1:4 tags (!...) are not supported: write the plain value",
    ),
    ("!!str a: 1\n", "1:1 tags (!...) are not supported: write the plain key"),
    ("a: 1\n\tb: 2\n", "2:1 a tab cannot indent: use spaces"),
    ("a: [1, 2\nb: 3\n", "2:2 expected ',' or ']', but got ':'"),
    ("a: 'x\n", "2:1 the text ends within quotes"),
    (
        "a: b: c\n",
        "1:5 a second ':' in this place: indent the line like its neighbours, or quote the value",
    ),
    ("a: *x\n", "1:4 found undefined alias 'x'"),
    ("a: &x 1\nb: &x 2\n", "2:4 the same anchor (&) is defined twice"),
    ("a: 1\n---\na: 2\n", "2:1 a second document (---): want only one"),
    ("a: 1\nb\nc: 2\n", "3:1 no ':' after a key, on this line or before it"),
    ("a: @b\n", "1:4 found character '@' that cannot start any token"),
    ("a: \x07\n", "1:4 the character U+0007 may not stand in YAML"),
    ("a: 1\nb: \ud800\n", "2:4 the character U+D800 may not stand in YAML"),
    ("", "1:1 the document is empty"),
    ("# nothing\n", "1:1 the document is empty"),
    ("---\n", "1:1 the document is empty"),
    ("a: &x [*x]\n", "1:4 nested deeper than 32 levels"),
    ("[" * 100, "1:33 nested deeper than 32 levels"),
]


@pytest.mark.parametrize(("text", "expected"), REFUSED)
def test_a_mistake_is_told_at_its_place(text: str, expected: str) -> None:
    assert problems(text) == [expected]


def test_mistakes_that_leave_the_rest_readable_are_told_together() -> None:
    assert problems("a: 010\nb:\na: 1\n2: x\n") == [
        "1:4 010 has a leading zero: write the number without it, or quote it",
        "2:1 'b' has no value: give it one, or remove it",
        "3:1 duplicate key 'a' (first at line 1)",
        "4:1 a key must be a text: quote it, as '2'",
    ]


def test_aliases_are_read_in_full_each_at_its_own_path() -> None:
    document = read_document("a: &x {b: [1, 2]}\nc: *x\n", "t.yaml")
    assert document.value == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}}
    assert document.places["c", "b", 1] == Place("t.yaml", 1, 15, "2")


def test_few_characters_cannot_become_many_values() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 8)
    ]
    (message,) = problems("\n".join(lines))
    assert message.endswith(f"aliases add more than {MAX_ALIASED_NODES} values")


def test_size_counts_bytes_not_characters() -> None:
    text = f"a: '{'é' * (MAX_BYTES // 2)}'\n"
    assert problems(text) == ["1:1 larger than 1 MiB"]


def test_a_long_document_is_refused_by_its_number_of_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yaml_document, "MAX_NODES", 1000)
    text = "a: [" + "1, " * 1000 + "]"
    (message,) = problems(text)
    assert message.endswith("more than 1000 values")


@given(st.text(alphabet=st.sampled_from("ab01:-{}[],&*!|>'\"#%@?\t\n \x07é"), max_size=60))
def test_no_text_raises_anything_but_a_config_error(text: str) -> None:
    for problem in problems(text):
        assert problem


_SCALARS = st.booleans() | st.integers(-(10**15), 10**15) | st.from_regex(r"[a-z]{1,8}", fullmatch=True).filter(lambda word: word not in {"true", "false", "null"})  # fmt: skip


@pytest.mark.slow
@given(
    st.recursive(
        _SCALARS,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.from_regex(r"k[a-z]{0,5}", fullmatch=True), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_written_values_are_read_back_and_every_one_has_its_place(value: object) -> None:
    text = _flow(value)
    document = read_document(text, "t.yaml")
    assert document.problems == []
    assert document.value == value
    for place in document.places.values():
        if place.written:
            assert text[place.column - 1 :].startswith(place.written)


def _flow(value: object) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(_flow(item) for item in value) + "]"
        case bool():
            return "true" if value else "false"
    return str(value)
