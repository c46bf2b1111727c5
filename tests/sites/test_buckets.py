"""Predictions count with the buckets that DistributedDataParallel makes of the trainer's model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # what DDP compares the annotation with
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.trainer.gpt import Gpt
from isthmus.topology.model.buckets import buckets_of
from isthmus.topology.spec.job import Model


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [1 << 18, 1 << 20, 64 << 20])
def test_buckets_are_those_of_ddp(tmp_path: Path, bucket_bytes: int) -> None:
    model = Model(layers=3, heads=2, width=128, context=64)
    found: list[int] = []

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        found.append(4 * bucket.buffer().numel())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(
            Gpt(model, seed=0), bucket_cap_mb=bucket_bytes / (1 << 20)
        )
        parallel.register_comm_hook(None, hook)
        for _ in range(2):  # the first pass has one bucket: DDP learns the order of gradients in it
            found.clear()
            tokens = torch.zeros(1, model.context, dtype=torch.long)
            parallel(tokens).sum().backward()
    finally:
        dist.destroy_process_group()
    assert found == [each.raw_bytes for each in buckets_of(model, bucket_bytes)]
