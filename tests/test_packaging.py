"""The four folders are top-level import names, so prove that they are ours."""

from importlib import metadata

import pytest


@pytest.mark.parametrize("name", ["orchestrator", "protos", "sites", "topology"])
def test_no_other_distribution_owns_our_import_names(name: str) -> None:
    owners = set(metadata.packages_distributions().get(name, ()))
    assert owners <= {"isthmus"}, f"{name!r} is also installed by {owners - {'isthmus'}}"
