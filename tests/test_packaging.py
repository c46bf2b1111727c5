"""The four folders are top-level import names, so prove that they are ours, and fit all Pythons."""

import ast
from importlib import metadata
from pathlib import Path

import pytest

NAMES = ["orchestrator", "protos", "sites", "topology"]
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", NAMES)
def test_no_other_distribution_owns_our_import_names(name: str) -> None:
    owners = set(metadata.packages_distributions().get(name, ()))
    assert owners <= {"isthmus"}, f"{name!r} is also installed by {owners - {'isthmus'}}"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_raised_where_groups_are_caught(name: str) -> None:
    """Python before 3.11.4 makes a group of what is raised in `except*`, and later ones do not."""
    for path in (ROOT / name).rglob("*.py"):
        text = path.read_text()
        if "except*" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.TryStar):
                inside = [each for handler in node.handlers for each in ast.walk(handler)]
                raised = [each.lineno for each in inside if isinstance(each, ast.Raise)]
                assert not raised, f"{path}: lines {raised}"
