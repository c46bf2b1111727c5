"""A YAML text as plain values, each with its place, so that mistakes can be located.

A plain (unquoted) scalar is a number, true, false, null, or else a text.

YAML 1.1, which PyYAML implements, reads `no` as false, `12:30:45` as 45045, `010` as 8 and `1e3` as
a text. Here a scalar is what it looks like (YAML 1.2's core schema, decimal numbers only): `no`,
`12:30:45` and `0x10` are texts, `1e3` is a number, and `010`, which looks like two things, is
refused.

PyYAML composes the nodes, which carry their marks; the conversion of nodes to values is our own.
PyYAML's loaders silently keep the last of two equal keys, read `no` as false, merge, and build
tagged objects. Here all of these are reported instead.

`--set path=value` puts a value into a document before it is checked.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from isthmus.topology.spec.errors import ConfigError, Problem

Path = tuple[str | int, ...]
"""The keys and positions from the root to a value."""

LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""The line breaks that PyYAML counts."""


_SAID_CHARACTERS = 400
"""Limit on the characters of a message or path: quoted names may be as long as the file."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a value or key. Line 0: not in the text, as for an override."""

    source: str
    line: int
    column: int
    written: str | None = None
    """A scalar as it was written, for messages; None for containers."""


class Document:
    """One parsed text.

    `problems` collects the mistakes; they raise no exceptions here.
    """

    def __init__(self, source: str, text: str) -> None:
        self.source = source
        self.written = text
        self.overrides: list[str] = []
        """Those that were applied, in order."""
        self.value: object = None
        self.problems: list[Problem] = []
        self.places: dict[Path, Place] = {}
        self.key_places: dict[Path, Place] = {}
        self.refused: set[Path] = set()
        """Paths of values that are wrong as YAML, which are not checked further."""
        self._lines = LINE_BREAK.split(text)

    def copied(self) -> Document:
        """Return a copy, to which overrides can be applied."""
        copied = copy.copy(self)
        copied.value = copy.deepcopy(self.value)
        copied.problems, copied.overrides = [*self.problems], [*self.overrides]
        copied.places, copied.key_places = {**self.places}, {**self.key_places}
        copied.refused = {*self.refused}
        return copied

    def add(self, path: Path, message: str, *, at_key: bool = False) -> None:
        """Add a problem with the value at `path`, or with its key."""
        place = self.key_places.get(path) if at_key else None
        self.add_at(place or self.place(path), message, path)

    def add_at(self, place: Place, message: str, path: Path) -> None:
        """Add a problem at a place of its own."""
        self.problems.append(self._problem(place, message, path))

    def problem(self, path: Path, message: str, *, is_warning: bool = False) -> Problem:
        """Return a problem with the value at `path`, without adding it."""
        return self._problem(self.place(path), message, path, is_warning=is_warning)

    def _problem(
        self, place: Place, message: str, path: Path, *, is_warning: bool = False
    ) -> Problem:
        excerpt = self._lines[place.line - 1] if 0 < place.line <= len(self._lines) else ""
        dotted = _cut(".".join(str(part) for part in path))
        return Problem(
            place.source, place.line, place.column, _cut(message), dotted, excerpt, is_warning
        )

    def refuse(self, mistakes: Sequence[tuple[Path, str]]) -> None:
        """Raise a ConfigError with a message for each path, in the order of the text, if any."""
        if mistakes:
            found = [self.problem(path, message) for path, message in mistakes]
            raise ConfigError(sorted(found, key=lambda each: (each.line, each.column)))

    def raise_problems(self) -> None:
        """Raise a ConfigError with every problem found so far, in the order of the text."""
        if self.problems:
            raise ConfigError(sorted(self.problems, key=lambda each: (each.line, each.column)))

    def is_refused(self, path: Path) -> bool:
        """Whether a problem was reported for the value at `path`, or for a container of it."""
        return any(path[:length] in self.refused for length in range(len(path) + 1))

    def place(self, path: Path) -> Place:
        """Return the place of the value at `path`, or of its innermost existing container."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(self.source, 1, 1))

    def get(self, *path: str | int) -> object:
        """Return the value at `path`, or None when there is none."""
        value = self.value
        for part in path:
            match value:
                case dict():
                    value = value.get(part)
                case list() if isinstance(part, int) and part < len(value):
                    value = value[part]
                case _:
                    return None
        return value

    def text(self, *path: str | int) -> str | None:
        """Return the text at `path`; None when there is none, or something else."""
        value = self.get(*path)
        return value if isinstance(value, str) and not self.is_refused(path) else None

    def mapping(self, *path: str | int) -> dict[str, object]:
        """Return the mapping at `path`; empty when there is none, or something else."""
        value = self.get(*path)
        return value if isinstance(value, dict) else {}

    def sequence(self, *path: str | int) -> list[object]:
        """Return the list at `path`; empty when there is none, or something else."""
        value = self.get(*path)
        return value if isinstance(value, list) else []


def _cut(text: str) -> str:
    return text if len(text) <= _SAID_CHARACTERS else f"{text[:_SAID_CHARACTERS]}…"


_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_DECIMAL = re.compile(
    r"[-+]?((0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?|\.[0-9]{1,18})([eE][-+]?[0-9]{1,3})?"
)
_PADDED = re.compile(r"[-+]?0[0-9]+(\.[0-9]*)?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}


class ScalarError(ValueError):
    """A plain scalar that could be read in two ways."""


def read_plain(text: str) -> str | int | float | bool | None:
    """Return what an unquoted scalar means.

    Raises:
        ScalarError: a number with leading zeros, which is decimal to some and octal to others.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _PADDED.fullmatch(text):
        raise ScalarError(f"{text} has a leading zero: write the number without it, or quote it")
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text


MAX_BYTES = 1 << 20
MAX_NODES = 100_000
"""Keys, values and containers that are written: a full mesh of 64 sites with every figure of every
link is about 75,000."""
MAX_ALIASED_NODES = 10_000
"""Those that aliases add, each use counted in full: a small text must not become a large one."""
MAX_DEPTH = 32


def read_document(text: str, source: str) -> Document:
    """Parse one YAML document: a file, or an override's value. Messages call it `source`.

    Raises:
        ConfigError: it is not YAML, is empty, or exceeds a limit. Every lesser mistake (duplicate
            keys, tags, empty values, keys that are not texts) is in the document's `problems`.
    """
    document = Document(source, text)
    if len(text) > MAX_BYTES or len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise ConfigError([Problem(source, 1, 1, f"larger than {MAX_BYTES >> 20} MiB", "")])
    try:
        composer = _Composer(text)
        root = composer.get_single_node()
        if root is None:
            raise ConfigError([Problem(source, 1, 1, "the document is empty", "")])
        _Conversion(document, composer).convert_root(root)
        if document.value is None:
            raise ConfigError([Problem(source, 1, 1, "the document is empty", "")])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        document.add_at(Place(source, line, column), _syntax_message(error), ())
        document.raise_problems()
    except yaml.reader.ReaderError as error:
        before = LINE_BREAK.split(text[: error.position])
        message = f"the character U+{int(error.character):04X} may not stand in YAML"
        document.add_at(Place(source, len(before), len(before[-1]) + 1), message, ())
        document.raise_problems()
    return document


class _Composer(yaml.SafeLoader):
    """The composer of nodes with marks; it limits depth and number, and constructs nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tagged: set[int] = set()
        """The `id` of each node that carries a tag of its own."""
        self.num_nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        self.num_nodes += 1
        self._depth += 1
        if self.num_nodes > MAX_NODES:
            _exceeds(f"more than {MAX_NODES} values", event)
        _check_depth(self._depth, event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if getattr(event, "tag", None) is not None:
            self.tagged.add(id(node))
        return node


class _Conversion:
    """Converts nodes to values, and adds mistakes to the document."""

    def __init__(self, document: Document, composer: _Composer) -> None:
        self._document = document
        self._tagged = composer.tagged
        self._num_left = composer.num_nodes + MAX_ALIASED_NODES
        """Number of nodes that may still come."""

    def convert_root(self, root: yaml.Node) -> None:
        self._document.value = self._convert(root, (), 1)

    def _convert(self, node: yaml.Node, path: Path, depth: int) -> object:
        """Return the node's value; at most MAX_DEPTH calls deep, even where an alias is its own."""
        self._num_left -= 1
        if self._num_left < 0:
            _exceeds(f"aliases add more than {MAX_ALIASED_NODES} values", node)
        _check_depth(depth, node)
        self._document.places[path] = self._place(node)
        if id(node) in self._tagged:
            self._refuse(path, "tags (!...) are not supported: write the plain value")
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [
                self._convert(item, (*path, index), depth + 1)
                for index, item in enumerate(node.value)
            ]
        assert isinstance(node, yaml.ScalarNode)
        return self._convert_scalar(node, path)

    def _convert_mapping(self, node: yaml.Node, path: Path, depth: int) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            self._num_left -= 1
            place = self._place(key_node)
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in mapping:
                first = self._document.key_places[*path, key].line
                message = f"duplicate key {key!r} (first at line {first})"
                self._document.add_at(place, message, (*path, key))
                continue
            self._document.key_places[*path, key] = place
            mapping[key] = self._convert(value_node, (*path, key), depth + 1)
        return mapping

    def _key(self, node: yaml.Node, path: Path) -> str | None:
        """Return a key, or None after reporting a problem."""
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        message = None
        if id(node) in self._tagged:
            message = "tags (!...) are not supported: write the plain key"
        elif not isinstance(node, yaml.ScalarNode):
            message = "a key must be a text, not a list or mapping"
        elif plain and node.value == "<<":
            message = "merge keys (<<) are not supported: write the keys out"
        elif plain and not _reads_as_text(node.value):
            message = f"a key must be a text: quote it, as '{node.value}'"
        if message is not None:
            self._document.add_at(self._place(node), message, path)
            return None
        return str(node.value)

    def _convert_scalar(self, node: yaml.ScalarNode, path: Path) -> object:
        text = str(node.value)
        if node.style is not None:
            return text
        try:
            value = read_plain(text)
        except ScalarError as error:
            self._refuse(path, str(error))
            return text
        if value is None:
            name = f"{path[-1]!r}" if path and isinstance(path[-1], str) else "this item"
            self._refuse(path, f"{name} has no value: give it one, or remove it")
        return value

    def _refuse(self, path: Path, message: str) -> None:
        self._document.refused.add(path)
        # An empty value has no text, so report the problem at its key.
        empty = self._document.places[path].written == ""
        self._document.add(path, message, at_key=empty)

    def _place(self, node: yaml.Node) -> Place:
        mark = node.start_mark
        written = str(node.value) if isinstance(node, yaml.ScalarNode) else None
        return Place(self._document.source, mark.line + 1, mark.column + 1, written)


def _reads_as_text(text: str) -> bool:
    try:
        return isinstance(read_plain(text), str)
    except ScalarError:
        return False


def _check_depth(depth: int, where: yaml.Node | yaml.Event) -> None:
    if depth > MAX_DEPTH:
        _exceeds(f"nested deeper than {MAX_DEPTH} levels", where)


def _exceeds(message: str, where: yaml.Node | yaml.Event) -> NoReturn:
    """Refuse a document that exceeds a limit."""
    mark = where.start_mark
    assert isinstance(mark, yaml.Mark), "the scanner in Python makes no other"
    raise yaml.MarkedYAMLError(problem=message, problem_mark=mark)


_PLAINER = {
    "found character '\\t' that cannot start any token": "a tab cannot indent: use spaces",
    "mapping values are not allowed here": (
        "a second ':' in this place: indent the line like its neighbours, or quote the value"
    ),
    "but found another document": "a second document (---): want only one",
    "could not find expected ':'": "no ':' after a key, on this line or before it",
    "found unexpected end of stream": "the text ends within quotes",
    "second occurrence": "the same anchor (&) is defined twice",
}
"""Plain wording for PyYAML's messages."""


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "not YAML"
    return _PLAINER.get(problem, problem)


def read_with_overrides(text: str, source: str, overrides: Sequence[str]) -> Document:
    """Parse one file's document, a mapping, and apply the overrides.

    Raises:
        ConfigError: the text is not YAML, or its root is not a mapping. Lesser mistakes are in the
            document's `problems`.
    """
    document = read_document(text, source)
    if not isinstance(document.value, dict):
        document.add((), "want a mapping: lines of key: value")
        document.raise_problems()
    apply_overrides(document, overrides)
    return document


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply each override in turn; one that cannot be placed becomes a problem.

    An override's value is YAML, so `--set failure.min_sites=2` sets a number and `--set
    "sites.0.location={lat: 1, lon: 2}"` a mapping. Missing mappings on the path are created; list
    positions count from 0 and must exist.
    """
    document.overrides += overrides
    for override in overrides:
        name, equals, text = override.partition("=")
        place = Place(f"--set {name}", 0, 0, text)
        parts = name.split(".")
        if not equals or "" in parts or not name.isprintable():
            document.add_at(place, "want path=value, as --set links.0.rtt=120ms", ())
        elif not text.strip():
            document.add_at(place, "no value: want path=value", tuple(parts))
        else:
            value = _value(document, place, name, text)
            if value is not None:
                _put(document, place, parts, value)


def _value(document: Document, place: Place, name: str, text: str) -> object:
    """Return the parsed value, or None after reporting a problem."""
    try:
        parsed = read_document(text, place.source)
        parsed.raise_problems()
    except ConfigError as error:
        document.problems += [
            Problem(place.source, 0, 0, problem.message, name) for problem in error.problems
        ]
        return None
    return parsed.value


def _put(document: Document, place: Place, parts: Sequence[str], value: object) -> None:
    """Put `value` at the path `parts`, or report why that is impossible."""
    container: Any = document.value
    path: Path = ()
    for part in parts:
        key = _key(container, part)
        if key is None:
            document.add_at(place, _misplaced(container, path, part), (*path, part))
            return
        path = (*path, key)
        if len(path) == len(parts):
            container[key] = value
        elif isinstance(container, dict) and key not in container:
            container[key] = {}
            _relocate(document, place, path)
        container = container[key]
    _relocate(document, place, path)


def _key(container: object, part: str) -> str | int | None:
    """Return the key or position for `part` in a container; None: not valid there."""
    if isinstance(container, dict):
        return part
    if isinstance(container, list) and part in map(str, range(len(container))):
        return int(part)
    return None


def _misplaced(container: object, path: Path, part: str) -> str:
    inside = ".".join(str(each) for each in path)
    if isinstance(container, list):
        return f"{inside} has {len(container)} items: want a position from 0, got {part!r}"
    return f"{inside or 'the document'} is a single value: it has no {part!r}"


def _relocate(document: Document, place: Place, path: Path) -> None:
    """Set the override as the place of the value, its content, and its key."""
    for places in (document.places, document.key_places):
        for old in [each for each in places if each[: len(path)] == path]:
            del places[old]
        places[path] = place
    document.refused = {each for each in document.refused if each[: len(path)] != path}
