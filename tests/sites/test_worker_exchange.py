"""The pipeline of a single rank, in this process: order, deadlines, errors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from protos.errors import (
    DeadlineExceededError,
    IsthmusError,
    LocalProtocolError,
    NoTokensError,
    RankLostError,
)
from sites.worker.alone_link import AloneLink
from sites.worker.collectives import Collectives
from sites.worker.environment import lone_topology
from sites.worker.exchange import Exchange
from sites.worker.host_transfer import HostTransfer
from sites.worker.initial_state import InitialState
from sites.worker.link import Link, Reduce, Reduced, Welcome
from sites.worker.process_group import ensure_process_group
from sites.worker.site import Site
from sites.worker.transfer import Pending, Slot, read_pieces
from topology.job import Job

LONG_S = 30.0


class DeafLink(AloneLink):
    """Never answers."""

    def reduce(self, request: Reduce) -> None:
        del request


class ScriptedLink(AloneLink):
    """Answers what a test tells it to."""

    def __init__(self, answer: Callable[[Reduce], Reduced]) -> None:
        super().__init__()
        self._answer = answer

    def reduce(self, request: Reduce) -> None:
        self._on_reduced(self._answer(request))


class BrokenLink(AloneLink):
    """Fails when it is used."""

    def reduce(self, request: Reduce) -> None:
        raise ZeroDivisionError(f"round {request.round}")


class RecordingLink(AloneLink):
    """Keeps the metrics and digests."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[str, int, Mapping[str, float]]] = []
        self.steps_hashed: list[int] = []
        self.has_left = False

    def send_metric(
        self, kind: str, step: int, values: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        del labels
        self.metrics.append((kind, step, values))

    def send_digest(
        self, step: int, combined: int, tensors: Sequence[int], names: Sequence[str]
    ) -> None:
        del combined, tensors, names
        self.steps_hashed.append(step)

    def leave(self) -> None:
        self.has_left = True


class StreamTransfer(HostTransfer):
    """As on CUDA: a result is in place only for whoever has waited for its future."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives)
        self.enqueued: list[Callable[[], object]] = []

    def make_future(self) -> torch.futures.Future[torch.Tensor]:
        transfer = self

        class StreamFuture(torch.futures.Future[torch.Tensor]):
            def wait(self) -> torch.Tensor:
                while transfer.enqueued:
                    transfer.enqueued.pop(0)()
                return super().wait()

        return StreamFuture()

    def deliver(
        self, slot: Slot, pieces: Sequence[torch.Tensor], complete: Callable[[], None]
    ) -> None:
        self.enqueued.append(partial(read_pieces, slot.padded.clone(), pieces))
        complete()


class SlowDevice(HostTransfer):
    """A device that has computed a bucket long after it was submitted: half a second ago."""

    def collect(self, slot: Slot, pending: Pending) -> float:  # type: ignore[override]
        super().collect(slot, pending)
        return 0.5


class BrokenSite(HostTransfer):
    """A collective fails; what the gateway says of it comes a little later, if it does."""

    cause: Callable[[], None] = staticmethod(lambda: None)

    def collect(self, slot: Slot, pending: Pending) -> None:
        del slot, pending
        telling = threading.Timer(0.01, self.cause)
        telling.daemon = True
        telling.start()
        raise RankLostError("a collective inside the site failed: connection closed by peer")


class SecondSite(AloneLink):
    """The sum of this site's values with those of a first site, which are all ones."""

    def reduce(self, request: Reduce) -> None:
        values = self._regions[request.region]
        if request.round == 0:
            values[:4] = 1.0
        else:
            values += 1.0
        values /= 2.0
        self._on_reduced(
            Reduced(
                round=request.round, bucket=request.bucket, weight=2.0, wait_s=0.0, wire_bytes=0
            )
        )


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """This process as the only rank."""
    ensure_process_group(torch.device("cpu"), LONG_S)
    yield
    dist.destroy_process_group()


@pytest.fixture
def start() -> Iterator[Callable[..., Exchange]]:
    """Start exchanges that are closed after the test."""
    started = []

    def start(link: Link, deadline_s: float = LONG_S) -> Exchange:
        transfer = HostTransfer(Collectives(LONG_S))
        exchange = Exchange(link, transfer, rank=0, world_size=1, deadline_s=deadline_s)
        exchange.start()
        started.append(exchange)
        return exchange

    yield start
    for each in started:
        each.close()


Start = Callable[..., Exchange]


def test_a_lone_rank_gets_its_own_values_back(start: Start) -> None:
    exchange = start(AloneLink())
    for numels in [(5, 7), (5, 7), (12, 1, 3)]:
        values = [torch.arange(float(numel)) for numel in numels]
        wanted = [each.clone() for each in values]
        exchange.begin(2.0)
        futures = [exchange.submit([each], layout=0) for each in values]
        finished = exchange.wait()
        for future, each, found in zip(futures, wanted, values, strict=True):
            assert torch.equal(future.wait(), each)
            assert torch.equal(found, each), "in place"
        assert (finished.site_weight, finished.weight) == (2.0, 2.0)
        assert finished.raw_bytes == 4 * sum(numels)
        assert finished.times.end_s >= finished.times.last_submit_s


def test_initial_state_waits_for_what_is_only_enqueued() -> None:
    exchange = Exchange(
        SecondSite(),
        StreamTransfer(Collectives(LONG_S)),
        rank=0,
        world_size=1,
        deadline_s=LONG_S,
    )
    exchange.start()
    net = nn.Linear(3, 1)
    state = InitialState(exchange, site_index=1, num_sites=2, rank=0, device=torch.device("cpu"))
    try:
        assert state.equalise([*net.named_parameters()])
    finally:
        exchange.close()
    for each in net.parameters():
        numbers = each.detach().view(torch.int16)
        assert torch.equal(numbers, torch.ones_like(numbers))


def test_what_a_device_still_computes_is_not_communication() -> None:
    ticks = itertools.count()
    exchange = Exchange(
        AloneLink(),
        SlowDevice(Collectives(LONG_S)),
        rank=0,
        world_size=1,
        deadline_s=LONG_S,
        now_s=lambda: float(next(ticks)),
    )
    exchange.start()
    try:
        exchange.begin(1.0)
        exchange.submit([torch.ones(3)], layout=0)
        times = exchange.wait().times
    finally:
        exchange.close()
    # Submitted at tick 0, collected at 1, handed over at 2.
    assert times.last_submit_s == 1.0 - 0.5
    assert times.crossings[0].start_s == 2.0


def test_no_tokens_mean_no_gradient_even_of_nan(start: Start) -> None:
    exchange = start(AloneLink())
    exchange.begin(0.0)
    future = exchange.submit([torch.full((3,), float("nan"))], layout=0)
    with pytest.raises(NoTokensError):
        exchange.wait()
    with pytest.raises(NoTokensError):
        future.wait()


def test_a_link_that_never_answers_meets_the_deadline(start: Start) -> None:
    exchange = start(DeafLink(), deadline_s=0.05)
    exchange.begin(1.0)
    future = exchange.submit([torch.ones(3)], layout=0)
    with pytest.raises(DeadlineExceededError, match="round 0: 0 of 1 buckets"):
        exchange.wait()
    assert future.done(), "nothing that waits for it hangs"
    with pytest.raises(DeadlineExceededError):
        exchange.begin(1.0)


def test_the_first_error_is_the_one_that_is_told(start: Start) -> None:
    exchange = start(BrokenLink())
    exchange.begin(1.0)
    exchange.submit([torch.ones(3)], layout=0)
    with pytest.raises(LocalProtocolError, match="ZeroDivisionError: round 0"):
        exchange.wait()
    exchange.fail(IsthmusError("later"))
    with pytest.raises(LocalProtocolError, match="ZeroDivisionError: round 0"):
        exchange.check()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_lost_rank_is_told_by_what_the_gateway_knows_of_it(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sites.worker.exchange._CAUSE_S", LONG_S if is_told else 0.01)
    transfer = BrokenSite(Collectives(LONG_S))
    exchange = Exchange(AloneLink(), transfer, rank=0, world_size=1, deadline_s=LONG_S)
    if is_told:
        transfer.cause = lambda: exchange.fail(IsthmusError("the gateway ended"))
    exchange.start()
    try:
        exchange.begin(1.0)
        future = exchange.submit([torch.ones(3)], layout=0)
        expected = "the gateway ended" if is_told else "a collective inside the site failed"
        with pytest.raises(IsthmusError, match=expected):
            exchange.wait()
        with pytest.raises(IsthmusError, match=expected):
            future.wait()
    finally:
        exchange.close()


@pytest.mark.parametrize(("round_", "bucket"), [(1, 0), (0, 1), (0, -1)])
def test_an_answer_that_was_not_asked_for_is_refused(
    start: Start, round_: int, bucket: int
) -> None:
    def answer(_: Reduce) -> Reduced:
        return Reduced(round=round_, bucket=bucket, weight=1.0, wait_s=0.0, wire_bytes=0)

    exchange = start(ScriptedLink(answer))
    exchange.begin(1.0)
    exchange.submit([torch.ones(3)], layout=0)
    with pytest.raises(IsthmusError, match="not asked for"):
        exchange.wait()


def test_a_round_begins_after_the_last_one(start: Start) -> None:
    exchange = start(DeafLink())
    exchange.begin(1.0)
    exchange.submit([torch.ones(3)], layout=0)
    with pytest.raises(LocalProtocolError, match="before the previous one, a backward pass say"):
        exchange.begin(1.0)


def _site(link: RecordingLink) -> Site:
    """A real site of one rank whose link records."""
    welcome = Welcome(
        site="only",
        site_index=0,
        sites=("only",),
        ranks_per_site=(1,),
        verify_every=2,
        config_hash="",
    )
    return Site(
        link=link,
        welcome=welcome,
        job=Job(name="test", topology="", timeline_every=0),
        topology=lone_topology(1),
        run_folder=Path(),
        device=torch.device("cpu"),
        owns_group=False,
    )


def test_steps_are_counted_and_logged() -> None:
    link = RecordingLink()
    site = _site(link)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no completed optimizer step"):
        site.log(loss=1.0)
    site.synchronize(model, optimizer)
    for step in range(3):
        torch.autograd.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        if step == 0:
            site.log(loss=torch.tensor(4.0))
            site.log(late=5)
    with pytest.raises(RuntimeError, match="already"):
        site.synchronize(model, optimizer)
    site.leave()
    steps = [(kind, step) for kind, step, _ in link.metrics]
    assert steps == [("step", 1), ("step", 1), ("step", 2), ("step", 3)]
    assert link.metrics[0][2]["loss"] == 4.0
    assert link.metrics[1][2] == {"late": 5.0}
    assert link.metrics[3][2]["step_s"] > 0.0
    assert link.steps_hashed == [0, 2]
    assert link.has_left


def test_what_is_not_ddp_is_refused() -> None:
    site = _site(RecordingLink())
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="got Linear: wrap the model first"):
        site.synchronize(net, optimizer)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got str"):
        site.synchronize(nn.parallel.DistributedDataParallel(net), "sgd")  # type: ignore[arg-type]
    site.leave()


@pytest.mark.parametrize(
    ("tensors", "kind", "said"),
    [
        (torch.ones(2), TypeError, "want a list of tensors, got a Tensor"),
        ([1.0], TypeError, r"tensors\[0\] is a float"),
        (
            [torch.ones(1), torch.ones(1, dtype=torch.int64)],
            TypeError,
            r"tensors\[1\] is of torch.int64",
        ),
        ([torch.ones(1).to_sparse()], TypeError, "to_dense"),
        ([torch.ones(1)] * 2, ValueError, "comes twice"),
    ],
    ids=["no list", "a number", "integers", "sparse", "twice"],
)
def test_what_cannot_be_averaged_is_refused(
    tensors: list[torch.Tensor], kind: type[Exception], said: str
) -> None:
    site = _site(RecordingLink())
    with pytest.raises(kind, match=said):
        site.all_reduce(tensors)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="0 or more"):
            site.all_reduce([torch.ones(1)], tokens=wrong)
    with pytest.raises(TypeError, match=r"site\.broadcast: want a list of tensors, got a str"):
        site.broadcast("model")  # type: ignore[arg-type]
    site.leave()


def test_an_optimizer_with_a_closure_is_refused() -> None:
    site = _site(RecordingLink())
    optimizer = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    site.average_gradients(optimizer)
    with pytest.raises(RuntimeError, match="with a closure"):
        optimizer.step(lambda: 0.0)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="already"):
        site.average_gradients(optimizer)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got Linear"):
        site.average_gradients(nn.Linear(2, 2))  # type: ignore[arg-type]
    site.leave()


def test_without_synchronisation_no_round_is_made() -> None:
    """Accumulated micro-batches cross once."""
    link = RecordingLink()
    site = _site(link)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.synchronize(model, optimizer)
    with model.no_sync():
        site.count_tokens(10)
        torch.autograd.backward(model(torch.ones(2, 3)).sum())
    site.count_tokens(7)
    torch.autograd.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    site.leave()
    assert link.metrics[0][2]["tokens"] == 17.0
    assert link.metrics[0][2]["raw_bytes"] == 12.0
    (weight,) = model.parameters()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[4.0, 4.0, 4.0]], "both micro-batches, averaged over one rank"
