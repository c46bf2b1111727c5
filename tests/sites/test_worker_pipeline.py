"""The pipeline of a single rank, in this process: order, deadlines, errors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.protos.errors import (
    DeadlineExceededError,
    IsthmusError,
    LocalProtocolError,
    NoTokensError,
    ScriptError,
)
from isthmus.sites.local.rank_messages import Reduce, Reduced, ReductionTimes
from isthmus.sites.worker.exchange.bucket_copy import Sizes, Transfer, write_pieces
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.collectives import Collectives
from isthmus.sites.worker.exchange.gateway_link import AloneLink
from isthmus.sites.worker.exchange.rounds import RoundTerms
from isthmus.sites.worker.exchange.routes import Route
from isthmus.sites.worker.layouts.initial_state import InitialState
from tests.fakes.lone_exchanges import (
    LONG_S,
    BrokenLink,
    BrokenSite,
    DeafLink,
    ScriptedLink,
    SecondSite,
    SlowDevice,
    StreamTransfer,
    lone_exchange,
)

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def start() -> Iterator[Callable[..., BucketPipeline]]:
    """Start exchanges that are closed after the test."""
    with ExitStack() as stack:
        yield lambda *given, **options: stack.enter_context(lone_exchange(*given, **options))


Start = Callable[..., BucketPipeline]


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
        assert finished.end_s >= finished.last_submit_s


def test_initial_state_waits_for_what_is_only_enqueued(start: Start) -> None:
    exchange = start(SecondSite(), StreamTransfer(Collectives(LONG_S)))
    net = nn.Linear(3, 1)
    state = InitialState(exchange, is_first=False, device=torch.device("cpu"))
    state._copy_from_first([*net.parameters()], layout=0)
    for each in net.parameters():
        numbers = each.detach().view(torch.int16)
        assert torch.equal(numbers, torch.ones_like(numbers))


def test_what_a_device_still_computes_is_not_communication(start: Start) -> None:
    ticks = itertools.count()
    device = SlowDevice(Collectives(LONG_S))
    exchange = start(AloneLink(), device, now_s=lambda: float(next(ticks)))
    exchange.begin(1.0)
    exchange.submit([torch.ones(3)], layout=0)
    times = exchange.wait().times
    # Submitted at tick 0, collected at 1, handed over at 2.
    assert times.exposed[0][0] == 1.0 - 0.5
    assert times.crossings[0].start_s == 2.0


def submit_one(exchange: BucketPipeline, *, tokens: float = 1.0) -> torch.futures.Future[Any]:
    """Begin a round of one bucket, of NaN where it has no tokens."""
    exchange.begin(tokens)
    return exchange.submit([torch.full((3,), 1.0 if tokens else float("nan"))], layout=0)


def expect(exchange: BucketPipeline, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        exchange.wait()


def test_no_tokens_mean_no_gradient_even_of_nan(start: Start) -> None:
    exchange = start(AloneLink())
    future = submit_one(exchange, tokens=0.0)
    expect(exchange, NoTokensError, "no rank of any site has tokens")
    with pytest.raises(NoTokensError):
        future.wait()


def test_a_link_that_never_answers_meets_the_deadline(start: Start) -> None:
    exchange = start(DeafLink(), deadline_s=0.05)
    future = submit_one(exchange)
    expect(exchange, DeadlineExceededError, "round 0: 0 of 1 buckets")
    assert future.done(), "nothing that waits for it hangs"
    with pytest.raises(DeadlineExceededError):
        exchange.begin(1.0)


def test_the_first_error_is_the_one_that_is_told(start: Start) -> None:
    exchange = start(BrokenLink())
    submit_one(exchange)
    expect(exchange, LocalProtocolError, "ZeroDivisionError: round 0")
    exchange.close()  # which is an error, too
    with pytest.raises(LocalProtocolError, match="ZeroDivisionError: round 0"):
        exchange.begin(1.0)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_lost_rank_is_told_by_what_the_gateway_knows_of_it(
    start: Start, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "isthmus.sites.worker.exchange.bucket_pipeline._CAUSE_S", LONG_S if is_told else 0.01
    )
    transfer = BrokenSite(Collectives(LONG_S))
    exchange = start(AloneLink(), transfer)
    if is_told:
        transfer.cause = lambda: exchange._open.fail(IsthmusError("the gateway ended"))
    future = submit_one(exchange)
    expected = "the gateway ended" if is_told else "a collective inside the site failed"
    expect(exchange, IsthmusError, expected)
    with pytest.raises(IsthmusError, match=expected):
        future.wait()


@pytest.mark.parametrize(("round_", "bucket"), [(1, 0), (0, 1), (0, -1)])
def test_an_answer_that_was_not_asked_for_is_refused(
    start: Start, round_: int, bucket: int
) -> None:
    def answer(_: Reduce) -> Reduced:
        times = ReductionTimes()
        return Reduced(round=round_, bucket=bucket, weight=1.0, times=times, wire_bytes=0)

    exchange = start(ScriptedLink(answer))
    submit_one(exchange)
    expect(exchange, IsthmusError, "not asked for")


def test_a_round_begins_after_the_last_one(start: Start) -> None:
    exchange = start(DeafLink())
    submit_one(exchange)
    with pytest.raises(ScriptError, match="before the previous one, a backward pass say"):
        exchange.begin(1.0)


def test_padding_in_rank_major_order_is_computed_with_the_gradient() -> None:
    """On CUDA whoever waits for the gradient takes the shard, whatever an earlier bucket left."""
    transfer = Transfer(Collectives(LONG_S))
    slot = transfer.make_slot(Sizes(8, 0, 4), torch.full((4,), 7.0))
    way = Route(numel=8, held_numel=3, ranks=(0, 1), index=0, held=((0, 3),), there=None, back=None)
    own = slot.cut(Sizes.of(8, way, 2), way)
    write_pieces([torch.ones(3)], 1.0, own.padded)
    assert own.shard.tolist() == [1.0, 1.0, 1.0, 0.0]


class HoldingLink(AloneLink):
    """Answers once the test says so, from another thread, as a gateway does."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def reduce(self, request: Reduce) -> None:
        def answer() -> None:
            assert self.may_answer.wait(LONG_S)
            super(HoldingLink, self).reduce(request)

        threading.Thread(target=answer, daemon=True).start()


BACKGROUND = RoundTerms(is_background=True)


def test_a_round_in_the_background_is_waited_for_by_the_next_one(start: Start) -> None:
    """That time is exposed; what is computed meanwhile hides the rest."""
    link, ticks, is_waiting = HoldingLink(), itertools.count(), threading.Event()

    def now_s() -> float:
        if is_waiting.is_set():
            link.may_answer.set()
        return float(next(ticks))

    exchange = start(link, now_s=now_s)
    sent = exchange.begin(2.0, BACKGROUND)
    values = torch.arange(3.0)
    exchange.submit([values], layout=0)
    exchange.release()
    assert sent.num_finished == 0, "training goes on"
    is_waiting.set()
    exchange.begin(1.0)
    assert torch.equal(values, torch.arange(3.0)), "in place"
    ((begin_s, end_s),) = sent.waits
    assert end_s > begin_s
    assert sent.times.exposed == ((begin_s, end_s),)
    exchange.submit([torch.ones(2)], layout=0)
    exchange.wait()
    assert exchange.wait(sent) is sent, "its results were there before the other round began"
