"""A reduction as JSON, between the coordinator and the process that plans for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from topology.job import NamedTree, Reduction


def reduction_to(reduction: Reduction) -> dict[str, Any]:
    """Return a reduction as JSON values."""
    return dataclasses.asdict(reduction)


def reduction_from(fields: Mapping[str, Any]) -> Reduction:
    """Return the reduction that `reduction_to` made JSON of."""
    return Reduction(
        tree=fields["tree"],
        hub=fields["hub"],
        groups=tuple(tuple(group) for group in fields["groups"]),
        trees=tuple(NamedTree(**tree) for tree in fields["trees"]),
    )
