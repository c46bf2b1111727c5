"""Measure for how long training waits for a checkpoint, and how long writing one takes.

One rank trains the shipped model in this process and saves every fifth step, to a temporary
folder. In the step after one that is saved, training waits for the copy, and then the writing and
the digests go on beside it: that step is compared with the median of those that have nothing beside
them. The first save, for which memory is made, is shown apart.

With a width of 1536, 3 layers and a short context a checkpoint has 1 GB.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from isthmus.sites.checkpoint.checkpoints import Checkpoints
from isthmus.sites.checkpoint.exchange_state import ExchangeState
from isthmus.sites.checkpoint.place import Place
from isthmus.sites.checkpoint.run_objects import RunObjects
from isthmus.sites.checkpoint.training_state import TrainingState
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import make_optimizer, take_step
from isthmus.sites.worker.exchange.collectives import ensure_process_group
from isthmus.sites.worker.exchange.missing_sites import MissingSites
from isthmus.topology.spec.job import Checkpoint, Model, Trainer

EVERY = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--folder", help="where to write; else the system's temporary folder")


def run(options: argparse.Namespace) -> None:
    """Train, save, and print what it cost."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    ensure_process_group(device, 60.0)
    config = Trainer(
        steps=options.steps,
        model=Model(layers=options.layers, width=options.width, heads=8, context=options.context),
    )
    model = Gpt(config.model, 1).to(device)
    optimizer = make_optimizer(model, config.optimizer)
    text = np.frombuffer(Path(np.__file__).read_bytes() * 20, dtype=np.uint8)
    written: list[tuple[int, float, int, float]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Place(
            store=f"{folder}/store",
            local=Path(folder),
            run="bench",
            job="bench",
            generation=1,
            site="a",
            rank=0,
            local_rank=0,
            ranks={"a": 1},
            keep=1,
        )
        state, exchange = TrainingState(model, optimizer), ExchangeState(None, None, None)
        checkpoints = Checkpoints(
            settings=Checkpoint(every_steps=EVERY, keep=1),
            places=[place],
            device=device,
            objects=RunObjects(state, {}, exchange),
            data=dict,
            missing_sites=MissingSites(),
            make_common=lambda **_: True,
            landing=lambda: None,
            sync_every=lambda: 1,
            on_written=lambda *values: written.append(values),
            on_failed=lambda *_: None,
            on_store_failed=lambda *_: None,
            on_stays=lambda *_: None,
            on_waiting=lambda: None,
        )
        checkpoints.watch([optimizer])
        optimizer.register_step_post_hook(lambda *_: checkpoints.after_step(len(times_s) + 1))
        checkpoints.start(lambda value: value, 0)
        times_s: list[float] = []
        for step in range(1, options.steps + 1):
            begin_s = time.perf_counter()
            take_step(model, optimizer, text, config, step, np.arange(options.batch))
            if device.type == "cuda":
                torch.cuda.synchronize()
            times_s.append(time.perf_counter() - begin_s)
        checkpoints.finish(options.steps)
    # Step 5 is due, step 6 has the copy in it, and the writing beside it; the first ones warm up.
    quiet = [index for index in range(EVERY, options.steps) if index % EVERY > 1]
    quiet_s = median(times_s[index] for index in quiet)
    beside_s = median(times_s[index] for index in range(2 * EVERY, options.steps, EVERY))
    first_s, *stalls_s = (stall_s for *_, stall_s in written[:-1])  # the last one is of the end
    numel = sum(each.numel() for each in model.parameters())
    print(f"parameters       {numel / 1e6:.1f} M, checkpoint {written[-1][2] / 1e6:.0f} MB")
    print(f"step             {quiet_s * 1e3:.0f} ms; the one beside a save {beside_s * 1e3:.0f} ms")
    print(f"written within   {median(written_s for _, written_s, *_ in written):.2f} s")
    print(
        f"training waits   {median(stalls_s) * 1e3:.1f} ms a save, at most "
        f"{max(stalls_s) * 1e3:.1f} ms: {median(stalls_s) / quiet_s:.1%} of a step; for the first "
        f"one {first_s * 1e3:.1f} ms"
    )
