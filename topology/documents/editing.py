"""Writes a probe's figures into a topology's text, and leaves the rest of the text unchanged.

PyYAML composes the text; its marks give the positions of values, and text is only replaced or
inserted there. So comments, order, indentation and line breaks stay. The result is parsed again,
and must equal the old document with the new figures.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.text.yaml_document import Document, read_document

KEY = "measured"
Figures = Mapping[str, str]
"""The figures by key of `measured`, in the user's spelling: {"bandwidth": "8.7Gbit/s"}."""


@dataclass(frozen=True, slots=True)
class _Edit:
    """An edit that replaces text[start:end]; positions are characters."""

    start: int
    end: int
    text: str


def with_measured(text: str, source: str, measured: Mapping[int, Figures]) -> str:
    """Return the text of a topology with the `measured` section of some links set.

    Args:
        text: Text of a valid topology.
        source: Its name in messages.
        measured: Figures by position in `links`; other figures of that section are removed.

    Raises:
        ConfigError: the text is no YAML, has no such link, or cannot be edited because links share
            an anchor.
    """
    document = read_document(text, source)
    document.raise_problems()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    uses = _uses(root)
    edits: list[_Edit] = []
    for index, figures in measured.items():
        link = _link(root, index, source)
        if any(uses[id(node)] > 1 for node in _below(link)):
            raise _refused(document, index, figures, "an anchor (&) or alias (*) shares it")
        edits += _edit_link(text, link, figures)
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    _check(text, document, measured)
    return text


def _edit_link(text: str, link: yaml.MappingNode, figures: Figures) -> list[_Edit]:
    there = next((value for key, value in link.value if key.value == KEY), None)
    if there is None:
        return [_put_in(text, link, KEY, _flow(figures))]
    if not isinstance(there, yaml.MappingNode) or not there.value:
        return [_Edit(there.start_mark.index, there.end_mark.index, _flow(figures))]
    values = {key.value: value for key, value in there.value}
    if not values.keys() <= figures.keys():
        # A figure is removed, so the section is rewritten without its comments.
        if there.flow_style:
            return [_Edit(there.start_mark.index, there.end_mark.index, _flow(figures))]
        indent = _line_break(text) + " " * there.value[0][0].start_mark.column
        lines = indent.join(f"{key}: {value}" for key, value in figures.items())
        return [_Edit(there.start_mark.index, _end(there), lines)]
    edits = [
        _Edit(value.start_mark.index, value.end_mark.index, figures[key])
        for key, value in values.items()
    ]
    new = {key: value for key, value in figures.items() if key not in values}
    if not new:
        return edits
    last = edits.pop()  # insert behind the last value, which changes too
    after = _put_in(text, there, *new.popitem())
    for key, value in reversed(new.items()):
        after = _Edit(after.start, after.end, _put_in(text, there, key, value).text + after.text)
    if after.start == last.end:
        return [*edits, _Edit(last.start, last.end, last.text + after.text)]
    return [*edits, last, after]


def _put_in(text: str, mapping: yaml.MappingNode, key: str, value: str) -> _Edit:
    """Return the edit that adds a key behind the last one of a mapping that is not empty."""
    end = _end(mapping.value[-1][1])
    if mapping.flow_style:
        return _Edit(end, end, f", {key}: {value}")
    line_break = _line_break(text)
    indented = " " * mapping.value[0][0].start_mark.column + f"{key}: {value}"
    if text[end - 1] in "\r\n":  # a block scalar ends with its line
        return _Edit(end, end, indented + line_break)
    while end < len(text) and text[end] not in "\r\n":  # a comment belongs to its line
        end += 1
    return _Edit(end, end, line_break + indented)


def _end(node: yaml.Node) -> int:
    """Return the end of a node's last value; a block's own end mark is behind its comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, yaml.MappingNode) else last)
    return int(node.end_mark.index)


def _link(root: yaml.Node | None, index: int, source: str) -> yaml.MappingNode:
    links = None
    if isinstance(root, yaml.MappingNode):
        links = next((value for key, value in root.value if key.value == "links"), None)
    if isinstance(links, yaml.SequenceNode) and 0 <= index < len(links.value):
        link = links.value[index]
        if isinstance(link, yaml.MappingNode) and link.value:
            return link
    raise ConfigError([Problem(source, 0, 0, f"there is no link {index}", f"links.{index}")])


def _below(node: yaml.Node) -> list[yaml.Node]:
    """Return a node and all its descendants."""
    nodes = [node]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            nodes += [key, *_below(value)]
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            nodes += _below(item)
    return nodes


def _uses(root: yaml.Node | None) -> dict[int, int]:
    """Return how often each node occurs; more than once if aliases refer to it."""
    uses: dict[int, int] = {}
    for node in [] if root is None else _below(root):
        uses[id(node)] = uses.get(id(node), 0) + 1
    return uses


def _flow(figures: Figures) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in figures.items()) + "}"


def _line_break(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _check(text: str, before: Document, measured: Mapping[int, Figures]) -> None:
    """Check that the new text differs in the figures only."""
    expected = copy.deepcopy(before.value)
    assert isinstance(expected, dict)
    for index, figures in measured.items():
        expected["links"][index][KEY] = dict(figures)
    try:
        found = read_document(text, before.source)
        is_right = not found.problems and found.value == expected
    except ConfigError:
        is_right = False
    if not is_right:
        index, figures = next(iter(measured.items()))
        raise _refused(before, index, figures, "its form is not one that can be edited")


def _refused(document: Document, index: int, figures: Figures, why: str) -> ConfigError:
    place = document.place(("links", index))
    message = f"{KEY} cannot be written here, for {why}: write it yourself: {_flow(figures)}"
    return ConfigError([Problem(place.source, place.line, place.column, message, f"links.{index}")])
