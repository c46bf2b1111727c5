"""A machine of a site that cannot train says so, before anything is started there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isthmus.sites.node import supervisor
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.supervisor import Supervisor


def test_it_names_the_machine_and_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "what_lacks", lambda: "torch is 2.8.0, older than 2.9")
    order = SimpleNamespace(site=SimpleNamespace(name="eu"))
    unused = cast("Any", None)
    node = Supervisor(
        cast("Any", order),
        1,
        tmp_path,
        bind_host=None,
        dialled_host=None,
        inside_host=None,
        namespace=None,
        listener=unused,
        tasks=unused,
    )
    with pytest.raises(SiteError) as raised:
        asyncio.run(node.start_gateways())
    assert raised.value.code == "CANNOT_TRAIN"
    assert raised.value.failure.node == 1
    assert str(raised.value) == (
        "node 1 of site eu cannot train, for torch is 2.8.0, older than 2.9: "
        "pip install 'isthmus[train]'"
    )
    assert node.children == []
