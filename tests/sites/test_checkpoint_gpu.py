"""Checkpoints of what lies on a GPU: of one step, and training hardly waits for the copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from isthmus.sites.checkpoint.staging import Staging
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.collectives import ensure_process_group
from tests.sites.test_checkpoint_of_one_step import SCRIPTS, Run, check_goes_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The mode in which whatever waits for the device raises.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]

LONG_S = 60.0
CYCLES = 200_000_000
"""About a tenth of a second of a device's clock: what is enqueued after so long has not begun."""
NUM_TENSORS, NUMEL = 64, 4 << 20
"""1 GiB of float32."""


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def run(tmp_path: Path, device: torch.device) -> Iterator[Run]:
    ensure_process_group(device, LONG_S)
    joined: list[Site] = []
    yield Run(tmp_path, joined, device)
    for site in joined:
        site.leave()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.__name__)
def test_a_script_goes_on_in_the_same_bits(run: Run, script: Callable[[Site], None]) -> None:
    """It is saved three times, and goes on from the first two."""
    check_goes_on(run, script)


def ones(device: torch.device) -> dict[str, torch.Tensor]:
    return {str(at): torch.ones(1 << 20, device=device) for at in range(16)}


@pytest.mark.parametrize("where", ["same stream", "another stream", "the stream of copies"])
def test_what_changes_after_the_copy_does_not_reach_it(device: torch.device, where: str) -> None:
    staging, tensors = Staging(device), ones(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    if where == "the stream of copies":  # as in a backward pass that has a stream of its own
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copies = staging.copies(tensors)
        staging.order()
    else:
        copies = staging.copies(tensors)
    if where == "another stream":
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side if where == "another stream" else torch.cuda.current_stream()):
        for each in tensors.values():
            each.zero_()
    staging.wait()
    assert all(bool((each == 1).all()) for each in copies.values())
    assert all(each.is_pinned() for each in copies.values())


def test_copying_waits_for_nothing_once_its_memory_is_there(device: torch.device) -> None:
    staging, tensors = Staging(device), ones(device)
    staging.copies(tensors)
    staging.wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        staging.copies(tensors)
        staging.order()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    staging.wait()


def test_how_long_training_waits_for_a_copy_of_1_gib(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    staging = Staging(device)
    tensors = {str(at): torch.ones(NUMEL, device=device) for at in range(NUM_TENSORS)}
    rows = []
    for _ in range(4):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        before.record()
        staging.copies(tensors)
        after.record()
        enqueued_s = time.perf_counter() - begin_s
        staging.wait()
        rows.append((enqueued_s * 1e3, before.elapsed_time(after)))
    with capsys.disabled():
        print()
        for name, (enqueued_ms, device_ms) in zip(("first", *["later"] * 3), rows, strict=True):
            print(f"1 GiB, {name}: host {enqueued_ms:.1f} ms, device {device_ms:.1f} ms")
    enqueued_ms, device_ms = rows[-1]
    assert enqueued_ms < device_ms, "the host does not wait for the copies"
