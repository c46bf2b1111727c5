"""When buckets cross, and what is told of it: schedules, and the records of single steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from isthmus.protos import metrics
from isthmus.protos.errors import IsthmusError
from isthmus.sites.local.rank_messages import (
    Digest,
    FromRank,
    Members,
    Metric,
    Reduce,
    Reduced,
    ReductionTimes,
)
from isthmus.sites.worker.exchange.gateway_link import Link, SiteOnlyLink
from isthmus.sites.worker.exchange.rounds import Round
from isthmus.sites.worker.exchange.step_records import MAX_BUCKETS, StepLog, timeline_of
from tests.fakes.lone_exchanges import RecordingLink, lone_exchange

pytestmark = pytest.mark.usefixtures("process_group")


class Gateway(RecordingLink):
    """Answers as a gateway that had costs, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[int] = []
        self.ends: list[str] = []
        self.on_failed: Callable[[IsthmusError], None] = lambda _: None

    def start(
        self,
        on_reduced: Callable[[Reduced], None],
        on_failed: Callable[[IsthmusError], None],
        on_members: Callable[[Members], None] = lambda _: None,
    ) -> None:
        super().start(on_reduced, on_failed, on_members)
        self.on_failed = on_failed

    def reduce(self, request: Reduce) -> None:
        self.posted.append(request.bucket)
        times = ReductionTimes(wait_s=0.5, encode_s=0.25, decode_s=0.125)
        number, bucket, weight = request.round, request.bucket, request.weight
        self._on_reduced(
            Reduced(round=number, bucket=bucket, weight=weight, times=times, wire_bytes=10)
        )

    def send(self, message: FromRank, descriptor: int | None = None) -> None:
        assert not isinstance(message, Metric) or message.labels == {}
        super().send(message, descriptor)

    def leave(self, *, has_averaged: bool = True) -> None:
        del has_averaged
        self.ends.append("leave")

    def close(self) -> None:
        self.ends.append("close")


def log_of(link: Link, *, every: int = 0, **options: Any) -> StepLog:  # noqa: ANN401 - of the log
    return StepLog(link, sends=True, timeline_every=every, verify_every=0, **options)


def hidden_s(link: Gateway, done: Round) -> float:
    """Return how much of a step was hidden that was a round."""
    log = log_of(link, now_s=lambda: -1.0)
    log.end_step([done])
    log.flush()
    ((_, _, values),) = link.metrics
    return values[metrics.HIDDEN_INTER_S]


def one_round(link: Link, *, overlaps: bool, sizes: Sequence[int] = (5, 3, 2)) -> Round:
    """Send buckets of ones through an exchange whose clock counts its readings."""
    ticks = itertools.count()
    with lone_exchange(link, overlaps=overlaps, now_s=lambda: float(next(ticks))) as exchange:
        exchange.begin(2.0)
        for size in sizes:
            exchange.submit([torch.ones(size)], layout=0)
        return exchange.wait()


def test_a_serial_exchange_hands_over_at_the_end() -> None:
    link = Gateway()
    done = one_round(link, overlaps=False)
    assert link.posted == [0, 1, 2]
    assert [each.times.submitted_s for each in done.buckets] == [0.0, 1.0, 2.0]
    assert done.last_submit_s == 2.0
    assert min(each.times.start_s for each in done.buckets) > done.last_submit_s
    assert hidden_s(link, done) == 0.0


def test_an_overlapped_one_does_not_wait_for_the_end() -> None:
    link = Gateway()
    ticks = iter(range(100))
    with lone_exchange(link, now_s=lambda: float(next(ticks))) as exchange:
        exchange.begin(1.0)
        # Complete before the next bucket, and before the end of the round.
        exchange.submit([torch.ones(4)], layout=0).wait()
        exchange.submit([torch.ones(4)], layout=0)
        done = exchange.wait()
    first, second = done.buckets
    assert first.times.reduced_s < second.times.submitted_s
    assert hidden_s(link, done) >= first.times.reduced_s - first.times.start_s > 0.0


def test_costs_of_the_gateway_are_told() -> None:
    link = Gateway()
    log = log_of(link)
    log.end_step([one_round(link, overlaps=True), one_round(link, overlaps=True)])
    log.flush()
    ((kind, step, values),) = link.metrics
    assert (kind, step) == (metrics.STEP, 1)
    assert values[metrics.ENCODE_S] == 6 * 0.25
    assert values[metrics.DECODE_S] == 6 * 0.125
    assert values[metrics.RAW_BYTES] == 2 * 4 * (5 + 3 + 2)


def test_a_site_that_catches_up_has_no_tokens_and_no_data_of_its_own() -> None:
    """The others have its samples: neither do these count twice, nor are they the same data."""
    link = Gateway()
    log = log_of(link, rejoins=True)
    done = one_round(link, overlaps=True)
    done.gradient_hash = 7
    log.end_step([done])
    log.counts = True
    log.end_step([done])
    log.flush()
    assert [values[metrics.GRADIENT_HASH] for _, _, values in link.metrics] == [0, 7]
    assert [values[metrics.SITE_TOKENS] for _, _, values in link.metrics] == [0, done.site_weight]
    assert done.site_weight > 0


def test_a_site_by_itself_asks_nobody() -> None:
    gateway = Gateway()
    link = SiteOnlyLink(gateway)
    done = one_round(link, overlaps=True)
    assert gateway.posted == []
    assert (done.weight, done.wire_bytes, done.raw_bytes) == (2.0, 0, 40)
    assert all(
        torch.equal(each.pieces[0], torch.ones_like(each.pieces[0])) for each in done.buckets
    )
    link.send(Metric(kind="step", step=1, values={"loss": 1.0}, labels={}))
    assert gateway.metrics == [("step", 1, {"loss": 1.0})]
    link.send(Digest(step=2, combined=17, tensors=(17,), names=("weight",)))
    assert gateway.steps_hashed == [2]
    link.leave()
    link.close()
    assert gateway.ends == ["leave", "close"]


def test_a_site_by_itself_hears_that_the_run_failed() -> None:
    gateway = Gateway()
    failures: list[IsthmusError] = []
    SiteOnlyLink(gateway).start(lambda _: None, failures.append)
    error = IsthmusError("another site is lost")
    gateway.on_failed(error)
    assert failures == [error]


@pytest.mark.parametrize(("every", "kept"), [(0, []), (4, [1, 2, 3, 4, 8]), (100, [1, 2, 3])])
def test_which_steps_are_kept(every: int, kept: list[int]) -> None:
    link = Gateway()
    log = log_of(link, every=every)
    for _ in range(9):
        log.end_step([])
    assert [step for kind, step, _ in link.metrics if kind == metrics.TIMELINE] == kept


def test_a_kept_step_s_records() -> None:
    done = [one_round(Gateway(), overlaps=False), one_round(Gateway(), overlaps=True, sizes=(7,))]
    before_s, offset_s = time.time(), time.time() - time.perf_counter()
    first, *rest = timeline_of(1, -5.0, 99.0, done)
    assert first.kind == metrics.TIMELINE
    step, buckets = first.values, [each.values for each in rest]
    # One offset for all times: differences are those of the exchange's clock.
    assert step[metrics.END_S] - step[metrics.BEGIN_S] == pytest.approx(104.0)
    assert step[metrics.COMPUTED_S] - step[metrics.BEGIN_S] == pytest.approx(7.0)
    assert step[metrics.BEGIN_S] == pytest.approx(offset_s - 5.0, abs=before_s * 1e-6)
    assert [values[metrics.BUCKET_INDEX] for values in buckets] == [0, 1, 2, 3]
    assert {each.kind for each in rest} == {metrics.BUCKET}
    for values in buckets:
        phases = (metrics.SUBMITTED_S, metrics.POSTED_S, metrics.REDUCED_S, metrics.FINISHED_S)
        ordered = [values[name] for name in phases]
        assert ordered == sorted(ordered)
        assert (values[metrics.WIRE_BYTES], values[metrics.WAIT_S]) == (10.0, 0.5)
        assert (values[metrics.ENCODE_S], values[metrics.DECODE_S]) == (0.25, 0.125)
    assert [values[metrics.RAW_BYTES] for values in buckets] == [20.0, 12.0, 8.0, 28.0]


def test_a_step_of_very_many_buckets_is_cut_short() -> None:
    done = one_round(Gateway(), overlaps=True, sizes=[1] * (MAX_BUCKETS + 5))
    assert len([*timeline_of(1, 0.0, 1.0, [done])]) == 1 + MAX_BUCKETS
