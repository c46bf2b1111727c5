"""Which files of a site are shipped as logs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from isthmus.sites.node.supervisor import Supervisor


def test_every_file_that_processes_write_is_a_source(tmp_path: Path) -> None:
    for node in range(2):
        for local_rank in range(2):
            folder = tmp_path / f"node{node}" / "ranks" / "run-1_x" / "attempt_0" / str(local_rank)
            folder.mkdir(parents=True)
            (folder / "stdout.log").touch()
            (folder / "stderr.log").touch()
    order = SimpleNamespace(
        site=SimpleNamespace(nodes=2, accelerators_per_node=2),
        name="run-1",
        node_folder=lambda node: tmp_path / f"node{node}",
        node_gateways=lambda node: range(2 * node, 2 * node + 2),
        gateway_log=lambda gateway: tmp_path / f"node{gateway // 2}" / f"gateway{gateway}.log",
    )
    unused = cast("Any", None)
    found = [
        (source, path.name)
        for node in range(2)
        for source, path in Supervisor(
            cast("Any", order),
            node,
            tmp_path,
            bind_host="127.0.0.1",
            dialled_host=None,
            inside_host=None,
            namespace=None,
            listener=unused,
            tasks=unused,
        ).log_files()
    ]
    assert found == [
        ("rank0", "stdout.log"),
        ("rank0", "stderr.log"),
        ("rank1", "stdout.log"),
        ("rank1", "stderr.log"),
        ("torchrun0", "torchrun.log"),
        ("gateway0", "gateway0.log"),
        ("gateway1", "gateway1.log"),
        ("rank2", "stdout.log"),
        ("rank2", "stderr.log"),
        ("rank3", "stdout.log"),
        ("rank3", "stderr.log"),
        ("torchrun1", "torchrun.log"),
        ("gateway2", "gateway2.log"),
        ("gateway3", "gateway3.log"),
    ]
