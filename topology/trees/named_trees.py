"""The trees and groups that a job names: checked against the topology, mistakes at their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from topology.errors import Problem
from topology.job import NamedTree
from topology.suggest import did_you_mean
from topology.trees.pairs import Pairs
from topology.trees.shapes import Groups
from topology.trees.trees import Tree


def refused(key: str, message: str) -> Problem:
    """Return a problem with `reduction.KEY` of the job."""
    return Problem("job", 0, 0, message, f"reduction.{key}")


def named_trees(trees: Sequence[NamedTree], pairs: Pairs, problems: list[Problem]) -> list[Tree]:
    """Return the trees by site index; with problems, those trees that have none."""
    sound = []
    for index, tree in enumerate(trees):
        before = len(problems)
        path = f"trees.{index}"
        _check_names(tree, pairs.names, path, problems)
        if len(problems) == before:
            _check_form(tree, pairs, path, problems)
        if len(problems) == before:
            number = {name: site for site, name in enumerate(pairs.names)}
            parent = {number[child]: number[parent] for child, parent in tree.parents.items()}
            sound.append(Tree(number[tree.root], dict(sorted(parent.items())), tree.weight))
    return sound


def named_groups(
    groups: Sequence[Sequence[str]], names: Sequence[str], problems: list[Problem]
) -> Groups:
    """Return the groups by site index; incomplete where there are problems."""
    seen: set[str] = set()
    for index, group in enumerate(groups):
        for position, name in enumerate(group):
            path = f"groups.{index}.{position}"
            if name not in names:
                problems.append(_unknown(path, name, names))
            elif name in seen:
                problems.append(refused(path, f"{name!r} is in two groups"))
            seen.add(name)
    lacking = [name for name in names if name not in seen]
    if lacking:
        problems.append(
            refused("groups", f"every site is in a group: {_listed(lacking)} is in none")
        )
    return tuple(tuple(names.index(name) for name in group if name in names) for group in groups)


def _check_names(tree: NamedTree, names: Sequence[str], path: str, problems: list[Problem]) -> None:
    if tree.root not in names:
        problems.append(_unknown(f"{path}.root", tree.root, names))
    for child, parent in tree.parents.items():
        here = f"{path}.parents.{child}"
        problems.extend(
            _unknown(here, name, names) for name in (child, parent) if name not in names
        )
        if child == tree.root:
            problems.append(refused(here, f"{child!r} is the root: it has no parent"))
    lacking = [name for name in names if name != tree.root and name not in tree.parents]
    if lacking:
        message = f"every site but the root has a parent: {_listed(lacking)} has none"
        problems.append(refused(f"{path}.parents", message))


def _check_form(tree: NamedTree, pairs: Pairs, path: str, problems: list[Problem]) -> None:
    number = {name: site for site, name in enumerate(pairs.names)}
    for child, parent in tree.parents.items():
        if child != parent and not pairs.rate(number[child], number[parent]):
            message = f"no links both ways between {child!r} and {parent!r}"
            problems.append(refused(f"{path}.parents.{child}", message))
    circle = _circle(tree.parents, tree.root)
    if circle:
        message = (
            f"{' -> '.join(repr(name) for name in circle)} is a circle: it never gets to the root"
        )
        problems.append(refused(f"{path}.parents.{circle[0]}", message))


def _circle(parents: Mapping[str, str], root: str) -> list[str]:
    """Return the first circle in the order written, its first site also at the end; or nothing."""
    for child in parents:
        way = [child]
        while way[-1] != root:
            above = parents[way[-1]]
            if above in way:
                return [*way[way.index(above) :], above]
            way.append(above)
    return []


def _unknown(path: str, name: str, names: Iterable[str]) -> Problem:
    return refused(path, f"unknown site {name!r}{did_you_mean(name, names)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
