"""All cases of the conformance suite, once their modules are imported."""

from tests.conformance.case import CASES as CASES
from tests.conformance.cases import (
    changes,
    checkpoints,
    data,
    delayed,
    lone,
    loops,
    models,
    optimizers,
    surroundings,
    wrappers,
)

GROUPS = (
    loops,
    optimizers,
    models,
    lone,
    changes,
    wrappers,
    surroundings,
    data,
    checkpoints,
    delayed,
)
"""In the order of the table in docs/conformance.md."""
