"""A run at Weights & Biases, offline: what would be synchronised is what was measured."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.exporters.tool import Update
from isthmus.orchestrator.exporters.wandb import WandbRun
from isthmus.topology.spec.exporters import Wandb
from tests.fakes.exported_runs import (
    exported_run,
    is_near,
    needs_library,
    series_of,
    spec_with,
    update_of,
)

BLOCK_BYTES = 1 << 15
pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_library("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_DIR", raising=False)


def records_of(folder: Path) -> list[Any]:
    """Return all records of the one offline run in a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    for data in leveldb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield what a log of LevelDB's format has, after W&B's own 7 bytes.

    Blocks of 32 KiB; in each, parts of records with a checksum, a size, and whether a part is the
    whole record (1), or its first, a middle or its last part (2, 3, 4).
    """
    at, whole = 7, b""
    while at + 7 <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < 7:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        size, part = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):
            yield whole
            whole = b""


def send(update: Update, folder: Path) -> None:
    run = WandbRun(Wandb(project="p", mode="offline"), "r1", "hello-wan", folder, {"codec": "int8"})
    run.open()
    run.send(update)
    run.close()


def test_figures_of_every_step_are_kept_to_be_synchronised(tmp_path: Path) -> None:
    update = update_of(exported_run(tmp_path), spec_with(), is_last=True)
    send(update, tmp_path)
    records = records_of(tmp_path)
    (begun,) = [each.run for each in records if each.WhichOneof("record_type") == "run"]
    assert (begun.run_id, begun.project, begun.run_group) == ("r1", "p", "hello-wan")
    assert ("codec", '"int8"') in [(each.key, each.value_json) for each in begun.config.update]
    found: dict[str, list[tuple[int, float]]] = {}
    for each in records:
        if each.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in each.history.item
            }
            for name, value in row.items():
                if not name.startswith("_") and name != "trained_step":
                    found.setdefault(name, []).append((row["trained_step"], value))
    assert is_near(found, series_of(update.points))
    assert [each.exit.exit_code for each in records if each.HasField("exit")] == [0]


def test_a_run_that_failed_has_failed_there(tmp_path: Path) -> None:
    folder = exported_run(tmp_path, state="FAILED", reason="it broke", steps=2)
    send(update_of(folder, spec_with(), is_last=True), tmp_path)
    records = records_of(tmp_path)
    assert [each.exit.exit_code for each in records if each.HasField("exit")] == [1]
