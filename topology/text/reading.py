"""YAML text to a Document.

PyYAML composes the nodes, which carry their marks; the conversion to values is our own, so that
what its loaders do in silence (keep the last of two equal keys, read `no` as false, merge, build
tagged objects) is reported instead.
"""

import yaml

from topology.errors import ConfigError, Problem
from topology.text.document import LINE_BREAK, Document, Path, Place
from topology.text.scalars import ScalarError, read_plain

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
"""Keys, values and containers, each use of an alias counted in full.

A full mesh of 16 sites with every figure of every link written out is about 4,000; what this
stops is a small text that aliases expand to a large one.
"""
MAX_DEPTH = 32


def read_document(text: str, source: str) -> Document:
    """Parse one YAML document.

    Args:
        text: Of one file, or of one override's value.
        source: What messages call it.

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
        _Conversion(document, composer.tagged).convert_root(root)
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
    """Nodes with marks; depth and number limited while they are made. Constructs nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tagged: set[int] = set()
        """`id` of each node that carries a tag of its own."""
        self._depth = 0
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        self._num_nodes += 1
        self._depth += 1
        _check_limits(self._num_nodes, self._depth, event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if getattr(event, "tag", None) is not None:
            self.tagged.add(id(node))
        return node


class _Conversion:
    """Nodes to values, every mistake on the way told to the document."""

    def __init__(self, document: Document, tagged: set[int]) -> None:
        self._document = document
        self._tagged = tagged
        self._num_nodes = 0

    def convert_root(self, root: yaml.Node) -> None:
        self._document.value = self._convert(root, (), 1)

    def _convert(self, node: yaml.Node, path: Path, depth: int) -> object:
        """Return the node's value; at most MAX_DEPTH calls deep, even where an alias is its own."""
        self._num_nodes += 1
        _check_limits(self._num_nodes, depth, node)
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
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            self._num_nodes += 1
            place = self._place(key_node)
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in found:
                first = self._document.key_places[*path, key].line
                message = f"duplicate key {key!r} (first at line {first})"
                self._document.add_at(place, message, (*path, key))
                continue
            self._document.key_places[*path, key] = place
            found[key] = self._convert(value_node, (*path, key), depth + 1)
        return found

    def _key(self, node: yaml.Node, path: Path) -> str | None:
        """Return a key, or None after telling what is wrong with it."""
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
        # An empty value has no text of its own: its key is what a reader can find.
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


def _check_limits(num_nodes: int, depth: int, where: yaml.Node | yaml.Event) -> None:
    message = None
    if depth > MAX_DEPTH:
        message = f"nested deeper than {MAX_DEPTH} levels"
    elif num_nodes > MAX_NODES:
        message = f"more than {MAX_NODES} values, aliases counted in full"
    if message is not None:
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
"""What PyYAML says, and what a reader understands."""


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "not YAML"
    return _PLAINER.get(problem, problem)
