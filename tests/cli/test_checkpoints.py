"""Checkpoints that are damaged: commands refuse them by name, and take the one before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isthmus.sites.checkpoint.export import model_tensors
from tests.cli.conftest import Isthmus
from tests.sites.test_sharded_checkpoints import run


@pytest.mark.slow
@pytest.mark.multiprocess
def test_damaged_ones_are_refused_by_name_and_the_one_before_is_taken(
    isthmus: Isthmus, files: Path, tmp_path: Path
) -> None:
    stored = run(tmp_path / "run", ("fsdp2",))
    newest, second, third = sorted(stored.iterdir(), reverse=True)
    shared = newest / "shared" / "__0_0.distcp"
    shared.write_bytes(shared.read_bytes()[:-1])
    (second / "manifest.json").unlink()
    (stored / ".step-00000099.g1").mkdir()  # as a killed writer leaves it

    out = tmp_path / "model.safetensors"  # by the same rule as `launch --resume`
    taken = isthmus("checkpoints", "export", stored, "--out", out, "--json")
    assert taken.code == 0, taken.err
    assert f"refused: {newest.name}: shared/__0_0.distcp has" in taken.err
    assert f"refused: {second.name}: has no manifest.json: half written" in taken.err
    assert taken.envelope["data"]["checkpoint"] == str(third)
    exported, expected = load_file(out), model_tensors(str(third))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], each) for name, each in expected.items())

    own = third / "own" / "site0" / "0.pt"
    data = bytearray(own.read_bytes())
    data[len(data) // 2] ^= 1
    own.write_bytes(data)
    verified = isthmus("checkpoints", "verify", stored, "--json")
    assert (verified.code, verified.envelope["error"]["code"]) == (8, "BAD_CHECKPOINT")
    assert len(verified.envelope["error"]["where"]) == 3
    assert f"{third.name}: own/site0/0.pt has changed" in verified.err
    job = files / "job.yaml"
    by_itself = isthmus("launch", job, "--resume", newest, "--json")
    assert by_itself.code == 8
    assert f"is refused: {newest.name}: shared/__0_0.distcp" in by_itself.err
    shutil.rmtree(third)
    none = isthmus("launch", job, "--resume", stored, "--json")
    assert (none.code, none.envelope["error"]["code"]) == (8, "NO_CHECKPOINT")
