"""Sites of any layout go on from what they have saved: with the same bits, or in another layout."""

from __future__ import annotations

import itertools
import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from isthmus.protos.checkpoint.store import checkpoint_name, checkpoints_in
from isthmus.sites.checkpoint.export import model_tensors
from isthmus.sites.checkpoint.reader import storage_reader
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import Program, results, run_ranks
from tests.fakes.two_sites import gateway_processes
from tests.sites import layout_programs as programs

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(300)]

STEPS, SAVED = 5, 2
KEEP_ALL = f"checkpoint.keep={STEPS}"


def run(
    folder: Path,
    layouts: tuple[str, ...],
    *,
    resume: Path | None = None,
    is_noisy: bool = False,
    is_tied: bool = False,
    is_destroyed: bool = False,
    codec: str | None = None,
    program: Program = programs.train_saved,
    more: Sequence[str] = (),
    num_steps: int = STEPS,
    start: int = SAVED,
    changes: Mapping[int, str] | None = None,
) -> Path:
    """Train to the last step, from a checkpoint of `start` if there is one; return what was saved.

    `more` are further settings of the job, `changes` regimes to go over to after steps.
    """
    folder.mkdir()
    plan = {
        "layouts": layouts,
        "num_steps": num_steps,
        "is_noisy": is_noisy,
        "is_tied": is_tied,
        "is_destroyed": is_destroyed,
        "changes": {str(step): kind for step, kind in (changes or {}).items()},
    }
    (folder / "layouts.json").write_text(json.dumps(plan))
    ranks = [programs.RANKS[each] for each in layouts]
    store = folder / "store"
    job = [
        "exchange.bucket=64KiB",
        f"checkpoint.to={store}",
        "checkpoint.every=2 steps",
        KEEP_ALL,
        *more,
    ]
    if resume is not None:
        job.append(f"checkpoint.resume={resume}")
    if codec is None:
        job.append("exchange.error_feedback=false")  # that is kept by gateways that ship
        with FakeGateways(folder, ranks) as gateways:
            paths = [gateways.path(site) for site in range(len(ranks))]
            codes = run_ranks(folder, paths, ranks, program, job)
        assert gateways.problems == []
    else:
        with gateway_processes(folder, codec, tuple(ranks)) as (processes, paths):
            job.append(f"exchange.codec={codec}")
            codes = run_ranks(folder, paths, ranks, program, job)
            assert [process.end() for process in processes] == [0, 0]
    assert set(codes.values()) == {0}
    starts = {each["start"] for each in results(folder).values()}
    assert starts == {0 if resume is None else start}
    for each in checkpoints_in(str(store / "run")):
        each.verified()
    return store / "run"


def everything(store: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint: of model, optimizer and regime."""
    reader = storage_reader(str(store / checkpoint_name(step)))
    found = {
        path: torch.empty(each.size, dtype=each.properties.dtype)
        for path, each in reader.read_metadata().state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(found, storage_reader=reader, no_dist=True)
    return found


def final(store: Path) -> dict[str, torch.Tensor]:
    return model_tensors(str(store / checkpoint_name(STEPS)))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, marks=[] if each == "fsdp2" else [pytest.mark.exhaustive])
        for each in ("pp", "interleaved", "tp", "ep", "hsdp", "fsdp3", "fsdp2")
    ],
)
def test_a_layout_goes_on_with_the_same_bits(tmp_path: Path, layout: str) -> None:
    """AdamW, its schedule, generators, and what a script counts.

    The resumed run's script destroys its process groups before the last step is saved.
    """
    whole = run(tmp_path / "whole", (layout,), is_noisy=True)
    resume = whole / checkpoint_name(SAVED)
    resumed = run(tmp_path / "resumed", (layout,), resume=resume, is_noisy=True, is_destroyed=True)
    expected, found = final(whole), final(resumed)
    assert found.keys() == expected.keys() == {*programs.net(seed=0).state_dict()}
    different = [name for name, each in found.items() if not torch.equal(each, expected[name])]
    assert not different


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp3", "tp"),
        ("ddp", "pp"),
        ("pp", "fsdp3"),
        ("tp", "ep"),
        ("ep", "hsdp"),
        ("hsdp", "pp"),
        ("pp", "ddp"),
        ("interleaved", "tp"),
        ("fsdp3", "interleaved"),
        ("interleaved", "pp"),
    ],
)
def test_another_layout_goes_on_alike(tmp_path: Path, before: str, after: str) -> None:
    whole = run(tmp_path / "whole", (before,))
    other = run(tmp_path / "other", (after,), resume=whole / checkpoint_name(SAVED))
    expected = final(whole)
    for name, each in final(other).items():
        # Sums of float32 in another order, which AdamW's division makes larger.
        torch.testing.assert_close(each, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("before", "after"), [("pp", "pp"), ("pp", "tp"), ("fsdp2", "pp")])
def test_what_stages_share_goes_on(tmp_path: Path, before: str, after: str) -> None:
    whole = run(tmp_path / "whole", (before,), is_tied=True)
    resume = whole / checkpoint_name(SAVED)
    other = run(tmp_path / "other", (after,), resume=resume, is_tied=True)
    expected = final(whole)
    for name, each in final(other).items():
        torch.testing.assert_close(each, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layouts", [("pp", "fsdp2"), ("tp", "fsdp2"), ("ep", "hsdp"), ("interleaved", "pp")]
)
def test_what_codecs_owe_comes_back(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    """With the gateways that ship, under int8 and error feedback."""
    whole = run(tmp_path / "whole", layouts, is_noisy=True, codec="int8")
    resume = whole / checkpoint_name(SAVED)
    resumed = run(tmp_path / "resumed", layouts, resume=resume, is_noisy=True, codec="int8")
    expected = final(whole)
    for name, each in final(resumed).items():
        assert torch.equal(each, expected[name]), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", [("tp", "pp"), ("pp",), ("fsdp2", "pp")], ids="-".join)
def test_samples_go_on_where_ranks_share_them(tmp_path: Path, after: tuple[str, ...]) -> None:
    """Each sample of a pass once, in the order that only the seed decides, in any layouts."""
    before = ("tp", "pp")
    whole = run(tmp_path / "whole", before, program=programs.train_sampled)
    resume = whole / checkpoint_name(SAVED)
    resumed = run(tmp_path / "resumed", after, resume=resume, program=programs.train_sampled)
    drawn = drawn_by_step(tmp_path / "whole")
    assert drawn_by_step(tmp_path / "resumed") == drawn[SAVED:]
    num_whole = STEPS * programs.SAMPLED_BATCH // programs.SAMPLED
    taken = Counter(sample for step in drawn for sample in step)
    assert {taken[each] for each in range(programs.SAMPLED)} <= {num_whole, num_whole + 1}
    expected = final(whole)
    for name, each in final(resumed).items():
        if after == before:
            assert torch.equal(each, expected[name]), name
        else:
            torch.testing.assert_close(each, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def drawn_by_step(folder: Path) -> list[list[int]]:
    """Return the samples of each step, sorted; ranks that share data have drawn the same."""
    by_place: dict[tuple[str, int], list[list[int]]] = {}
    for name, each in results(folder).items():
        first = by_place.setdefault((name.partition("-")[0], each["place"]), each["drawn"])
        assert first == each["drawn"], name
    steps = zip(*by_place.values(), strict=True)
    return [sorted(itertools.chain.from_iterable(step)) for step in steps]


@pytest.mark.exhaustive
def test_what_was_owed_to_another_cut_is_forgotten(tmp_path: Path) -> None:
    """As many ranks at each site, that share other buckets."""
    whole = run(tmp_path / "whole", ("hsdp", "fsdp2"), codec="int8")
    resume = whole / checkpoint_name(SAVED)
    resumed = run(tmp_path / "resumed", ("pp", "fsdp2"), resume=resume, codec="int8")
    expected = final(whole)
    for name, each in final(resumed).items():
        torch.testing.assert_close(each, expected[name], rtol=0.1, atol=0.02, msg=name)
