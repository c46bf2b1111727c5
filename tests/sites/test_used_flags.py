"""Which parameters have a gradient after a backward pass: where sites use unlike ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.local.rank_messages import Reduce
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.bucket_copy import Transfer
from isthmus.sites.worker.exchange.collectives import Collectives
from tests.fakes.lone_exchanges import RecordingLink, StreamTransfer
from tests.fakes.lone_sites import lone_site

pytestmark = pytest.mark.usefixtures("process_group")

NUM_PARAMETERS, NUMEL = 4, 21


class OthersUse(RecordingLink):
    """A link to sites that use the first parameter only, and do not hear this one."""

    def reduce(self, request: Reduce) -> None:
        if request.numel in (NUM_PARAMETERS, NUMEL + NUM_PARAMETERS):
            flags = self._regions[request.region][: request.numel][-NUM_PARAMETERS:]
            flags[:] = np.array([1.0, 0.0, 0.0, 0.0], np.float32)
        super().reduce(request)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def _sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def _replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def test_where_every_parameter_is_used_gradients_are_written_once(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside shards flags cross, too; DistributedDataParallel itself writes all gradients."""
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer, beside_shards=True)
    written: list[object] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *given: written.append(given))
    backward(model(torch.ones(5, 3)).sum())
    monkeypatch.undo()
    assert len(written) == NUM_PARAMETERS + 1, "into its buckets, and the flags"


def test_what_others_have_not_used_no_optimizer_steps() -> None:
    """This site follows, or counts no tokens: its own use is not heard of."""
    site = lone_site(OthersUse())
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    site.average_gradients(optimizer)
    backward(model(torch.ones(5, 3)).sum())
    optimizer.step()
    has_grad = [each.grad is not None for each in model.parameters()]
    assert has_grad == [True, False, False, False]
    site.leave()


@pytest.mark.parametrize("wrap", [_sharded, _replicated])
def test_what_only_a_site_that_follows_has_used_has_no_gradient(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    """Nobody else steps it."""
    site = lone_site(OthersUse())
    model = wrap(_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    for is_catching_up in (True, False):
        site._parts.rank.members.is_catching_up = is_catching_up
        backward(model(torch.ones(5, 3)).sum())
        has_grad = [each.grad is not None for each in model.parameters()]
        assert has_grad == ([True, False, False, False] if is_catching_up else [True] * 4)
        optimizer.zero_grad()
    site.leave()


def test_flags_are_in_place_when_the_backward_pass_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the next round's are written to the same memory, by another stream."""
    transfers: list[StreamTransfer] = []

    def make(collectives: Collectives) -> Transfer:
        transfers.append(StreamTransfer(collectives))
        return transfers[-1]

    monkeypatch.setattr("isthmus.sites.worker.api.averaging.Transfer", make)
    model = _sharded(nn.Linear(3, 1))
    site.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model(torch.ones(4, 3)).sum())
    assert transfers[0].enqueued == []
