"""What the ranks of the trainer's tests run."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from isthmus.sites.trainer.__main__ import main
from isthmus.sites.worker.api import joining
from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.run_spec import RunSpec
from tests.fakes import host_ring
from tests.fakes.ranks import JOB as JOB_TEXT

JOB = (
    "trainer.steps=12",
    "trainer.global_batch=13",
    "trainer.micro_batch=2",
    "trainer.evaluate_every=5",
    "trainer.evaluation_batches=3",
    "trainer.model={layers: 2, heads: 2, width: 32, context: 24}",
    "trainer.optimizer={learning_rate: 1.0e-3, min_learning_rate: 1.0e-4, warmup_steps: 3}",
    "trainer.data.files=['texts/*.txt']",
    "exchange.bucket=64KiB",
)
"""As --set would give them. 13 sequences over 6 ranks in micro-batches of 2: nothing divides."""


def train(folder: Path, _: str) -> None:
    """Train the job."""
    _run(folder, JOB)


def train_placed(folder: Path, _: str) -> None:
    """The second site, of one rank, takes most of the batch."""
    placement = "placement=[{site: site1, sequences: 10}, {site: site0, sequences: 3}]"
    _run(folder, (*JOB, placement))


def train_told(folder: Path, _: str) -> None:
    """Train with the settings that the test has written into the folder."""
    _run(folder, (*JOB, *(folder / "settings.txt").read_text().splitlines()))


def train_in_a_ring(folder: Path, name: str) -> None:
    """The same, where sequences may be cut on the host."""
    host_ring.allow()
    train_told(folder, name)


def train_in_a_ring_on_a_card(folder: Path, name: str) -> None:
    """Train over NCCL with the settings of the folder; both ranks may share one card."""
    vars(joining)["choose_device"] = partial(_take_card, int(os.environ["RANK"]))
    settings = (folder / "settings.txt").read_text().splitlines()
    _run(folder, (*JOB, *settings), backend="nccl")


def train_other_text(folder: Path, name: str) -> None:
    """The second site finds other files."""
    files = "trainer.data.files=['other/*.txt']"
    _run(folder, (*JOB, files) if name.startswith("site1") else JOB)


def train_other_text_in_one_rank(folder: Path, name: str) -> None:
    """The second rank of the first site finds other files, as on another node it might."""
    files = "trainer.data.files=['other/*.txt']"
    _run(folder, (*JOB, files) if name == "site0-rank1" else JOB)


def train_too_small_a_batch(folder: Path, _: str) -> None:
    """One sequence a step, for several ranks."""
    _run(folder, (*JOB, "trainer.global_batch=1"))


def train_modelled(folder: Path, _: str) -> None:
    """Only let the time of a step pass, and hand buckets over at its end."""
    _run(folder, (*JOB, "trainer.compute=modelled", "exchange.schedule=serial"))


def train_each_site_by_itself(folder: Path, _: str) -> None:
    """No exchange between sites."""
    _run(folder, (*JOB, "exchange.schedule=off"))


def _take_card(rank: int) -> torch.device:
    """Take a card of this rank's own, or share the only one.

    NCCL has no two ranks on one card of a host: so each says that it has a host for itself.
    """
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        rank = 0
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _run(folder: Path, overrides: tuple[str, ...], *, backend: str = "gloo") -> None:
    """Be `isthmus.sites.trainer`; torch.distributed meets in a file, which needs no port."""
    spec = RunSpec.from_bytes(Path(os.environ["ISTHMUS_SPEC"]).read_bytes())
    job = load_job(JOB_TEXT, "job.yaml", overrides)
    own = folder / f"{os.environ['ISTHMUS_SITE']}-{os.environ['RANK']}.json"
    own.write_bytes(dataclasses.replace(spec, job=job).to_bytes())
    os.environ["ISTHMUS_SPEC"] = str(own)
    dist.init_process_group(
        backend,
        init_method=f"file://{os.environ['TEST_STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    sys.argv = ["trainer"]
    warnings.simplefilter("error")
    # torch.compile's own, of torch 2.13.
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    error_file = folder / f"{os.environ['ISTHMUS_SITE']}-{os.environ['RANK']}.error"
    try:
        main()
    except Exception as error:
        error_file.write_text(f"{type(error).__name__}: {error}")
        raise
