"""Processes whose coverage is not measured."""

from collections.abc import Mapping


def unmeasured(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what makes coverage begin in each process that has it."""
    return {name: value for name, value in environment.items() if "COVERAGE" not in name}
