"""What a node's earlier processes left of training states goes when the site is prepared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isthmus.sites.local.entry_folder import INDEX, TENSORS, entry_folder
from isthmus.sites.node.supervisor import Supervisor


@pytest.mark.parametrize(("returns", "kept"), [(False, set()), (True, {"epoch-3"})])
def test_the_newest_whole_one_stays_where_the_site_comes_back(
    tmp_path: Path, returns: bool, kept: set[str]
) -> None:
    """Where all others are lost meanwhile, it may be all that is left of the run."""
    for epoch, name in ((2, INDEX), (3, INDEX), (4, TENSORS)):
        entry_folder(tmp_path, epoch).mkdir(parents=True)
        (entry_folder(tmp_path, epoch) / name).touch()
    order = SimpleNamespace(node_folder=lambda _: tmp_path, returns=returns)
    unused = cast("Any", None)
    Supervisor(
        cast("Any", order),
        0,
        tmp_path,
        bind_host=None,
        dialled_host=None,
        inside_host=None,
        namespace=None,
        listener=unused,
        tasks=unused,
    )._remove_states()
    assert {each.name for each in (tmp_path / "entry").iterdir()} == kept
