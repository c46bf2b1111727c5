"""Checks the trees and groups of a job against the topology; problems have their paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from isthmus.topology.spec.errors import Problem
from isthmus.topology.spec.job import NamedTree
from isthmus.topology.spec.reduction_plan import Tree
from isthmus.topology.spec.suggest import did_you_mean
from isthmus.topology.trees.pairs import Pairs
from isthmus.topology.trees.shapes import Groups


def refused(key: str, message: str) -> Problem:
    """Return a problem with `reduction.KEY` of the job."""
    return Problem("job", 0, 0, message, f"reduction.{key}")


def named_trees(trees: Sequence[NamedTree], pairs: Pairs, problems: list[Problem]) -> list[Tree]:
    """Return the trees with site indices, leaving out those with problems."""
    sound = []
    for index, tree in enumerate(trees):
        before = len(problems)
        path = f"trees.{index}"
        if tree.root not in pairs.names:
            problems.append(_unknown(f"{path}.root", tree.root, pairs.names))
        _check_names(tree.root, tree.parents, pairs.names, f"{path}.parents", problems)
        if tree.down is not None:
            _check_names(tree.root, tree.down, pairs.names, f"{path}.down", problems)
        if len(problems) == before:
            _check_form(tree.root, tree.parents, pairs, f"{path}.parents", problems)
            if tree.down is not None:
                _check_form(tree.root, tree.down, pairs, f"{path}.down", problems)
        if len(problems) == before:
            root, parent = pairs.names.index(tree.root), _by_index(tree.parents, pairs.names)
            down = None if tree.down is None else _by_index(tree.down, pairs.names)
            sound.append(Tree(root, parent, tree.weight, down))
    return sound


def _by_index(way: Mapping[str, str], names: Sequence[str]) -> dict[int, int]:
    number = {name: site for site, name in enumerate(names)}
    return dict(sorted((number[child], number[parent]) for child, parent in way.items()))


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


def _check_names(
    root: str, way: Mapping[str, str], names: Sequence[str], path: str, problems: list[Problem]
) -> None:
    for child, parent in way.items():
        here = f"{path}.{child}"
        problems.extend(
            _unknown(here, name, names) for name in (child, parent) if name not in names
        )
        if child == root:
            problems.append(refused(here, f"{child!r} is the root: it has no parent"))
    lacking = [name for name in names if name != root and name not in way]
    if lacking:
        message = f"every site but the root has a parent: {_listed(lacking)} has none"
        problems.append(refused(path, message))


def _check_form(
    root: str, way: Mapping[str, str], pairs: Pairs, path: str, problems: list[Problem]
) -> None:
    number = {name: site for site, name in enumerate(pairs.names)}
    for child, parent in way.items():
        if child != parent and not pairs.rate(number[child], number[parent]):
            message = f"no links both ways between {child!r} and {parent!r}"
            problems.append(refused(f"{path}.{child}", message))
    circle = _circle(way, root)
    if circle:
        message = (
            f"{' -> '.join(repr(name) for name in circle)} is a circle: it never gets to the root"
        )
        problems.append(refused(f"{path}.{circle[0]}", message))


def _circle(parents: Mapping[str, str], root: str) -> list[str]:
    """Return a circle of sites, with its first one repeated at the end; empty: none."""
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
