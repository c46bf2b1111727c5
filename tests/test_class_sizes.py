"""No class is longer than 500 lines, none has more than 20 fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES, FIELDS = 500, 20
SPECS = ("topology/spec/", "sites/gateway/config.py")
"""What was decided, or is written: as many fields as there are keys."""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for folder in ("orchestrator", "sites", "topology", "protos", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if "_pb2" in name or name.startswith(SPECS):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield name, node


def fields_of(node: ast.ClassDef) -> set[str]:
    """Return what a class declares, and what its methods set on `self`."""
    declared = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    }
    assigned = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return declared | assigned


def num_lines(node: ast.ClassDef) -> int:
    assert node.end_lineno is not None, "it was parsed"
    return node.end_lineno - node.lineno + 1


def test_no_class_is_larger_than_one_head_holds() -> None:
    larger = {
        node.name: path
        for path, node in classes()
        if num_lines(node) > LINES or len(fields_of(node)) > FIELDS
    }
    assert not larger


def test_fields_are_counted_wherever_they_are_set() -> None:
    [node] = ast.parse(
        "class A:\n"
        "    kept: int = 0\n"
        "    of_all: ClassVar[int] = 1\n"
        "    def __init__(self):\n"
        "        self.one, (self.two, other.three) = 1, (2, 3)\n"
        "    def change(self):\n"
        "        self.four += 1\n"
    ).body
    assert isinstance(node, ast.ClassDef)
    assert fields_of(node) == {"kept", "one", "two", "four"}
    assert num_lines(node) == 7
