"""A gradient that is not finite is told as that, once, by whoever had it first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.protos import metrics
from isthmus.protos.errors import NonFiniteError
from isthmus.sites.local.rank_messages import Reduce
from isthmus.sites.worker.exchange.bucket_copy import Transfer
from isthmus.sites.worker.exchange.collectives import Collectives
from isthmus.sites.worker.exchange.finite_watch import FiniteWatch, are_finite
from isthmus.sites.worker.exchange.gateway_link import AloneLink
from isthmus.sites.worker.exchange.rounds import HASHED_NUMEL, RoundTerms, hash_of_site
from tests.fakes.gateways import FakeGateways
from tests.fakes.lone_exchanges import LONG_S, CountingLink, lone_exchange
from tests.fakes.ranks import run_ranks
from tests.sites import layout_programs

NAN, INF = float("nan"), float("inf")


class Told:
    """What a rank tells the coordinator."""

    def __init__(self, *, stops: bool = False) -> None:
        self.reports: list[tuple[str, str, bool]] = []
        self.watch = FiniteWatch(lambda *report: self.reports.append(report), stops=stops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_each_place_of_each_dtype_is_looked_at(dtype: torch.dtype, value: float) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert are_finite([values, values[:0], torch.zeros(3, dtype=dtype)])
    for place in (0, 50, 99):
        bad = values.clone()
        bad[place] = value
        assert not are_finite([values, bad])


def gradient(seed: int) -> torch.Tensor:
    return torch.randn(2000, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("zeros", lambda values: values.zero_()),
        ("all NaN", lambda values: values.fill_(NAN)),
        ("all infinite", lambda values: values.fill_(INF)),
        ("infinities of both signs", lambda values: values.sign_().mul_(INF)),
        ("one NaN", lambda values: values[7:8].fill_(NAN)),
        ("one infinity among zeros", lambda values: values.zero_()[3:4].fill_(-INF)),
        ("a constant", lambda values: values.fill_(0.25)),
        ("a constant of both signs, and zeros", lambda values: values.sign_().mul_(0.5)),
    ],
)
def test_what_says_nothing_of_the_data_has_no_hash(
    name: str, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    values = gradient(1)
    spoil(values)
    values[HASHED_NUMEL:] = gradient(2)[HASHED_NUMEL:]
    assert hash_of_site(values) == 0, name


def test_what_follows_from_data_has_a_hash() -> None:
    assert hash_of_site(gradient(1)) == hash_of_site(gradient(1)) != 0
    assert hash_of_site(gradient(1)) != hash_of_site(gradient(2))
    assert hash_of_site(torch.tensor([1.0, 0.0, 2.0])) != 0
    spoilt = gradient(1)
    spoilt[HASHED_NUMEL:] = NAN  # another part of the gradient says what it says
    assert hash_of_site(spoilt) == hash_of_site(gradient(1))


def train(
    told: Told, *gradients: list[float], tokens: float = 1.0, is_gradient: bool = True
) -> None:
    """Average each in a round of its own, with nobody else."""
    with lone_exchange(AloneLink(), finite=told.watch) as exchange:
        for values in gradients:
            piece = torch.tensor(values)
            exchange.begin(tokens, RoundTerms(is_gradient=is_gradient))
            exchange.submit([piece], layout=0, named=[("first", piece[:2]), ("last", piece[2:])])
            exchange.wait()


@pytest.mark.usefixtures("process_group")
def test_the_tensor_and_what_it_held_are_told_once_until_steps_are_finite_again() -> None:
    told = Told()
    train(told, [1, 1, 1, 1], [1, 1, NAN, 1], [NAN] * 4, [1, 1, 1, 1], [1, INF, NAN, 1])
    assert told.reports == [
        ("last", "the gradient of last held a NaN before it was averaged", False),
        ("first", "the gradient of first held an infinity before it was averaged", False),
    ]


@pytest.mark.usefixtures("process_group")
def test_what_counts_nothing_is_not_told() -> None:
    told = Told(stops=True)
    train(told, [1.0, NAN, 1.0], is_gradient=False)  # a loss, say, by site.all_reduce
    assert not told.reports
    link = CountingLink()
    link.other_tokens = 1.0
    with lone_exchange(link, finite=told.watch) as exchange:
        exchange.begin(0.0, RoundTerms(is_gradient=True))  # a loss over no tokens is often NaN
        exchange.submit([torch.tensor([NAN])], layout=0)
        exchange.wait()
    assert not told.reports


@pytest.mark.usefixtures("process_group")
def test_the_run_stops_before_anything_is_handed_over() -> None:
    told, link = Told(stops=True), CountingLink()
    with lone_exchange(link, finite=told.watch) as exchange:
        exchange.begin(1.0, RoundTerms(is_gradient=True))
        bad = torch.tensor([1.0, NAN])
        with pytest.raises(NonFiniteError, match="the gradient of w held a NaN"):
            exchange.submit([bad], layout=0, named=[("w", bad)])
        with pytest.raises(NonFiniteError):
            exchange.wait()
    assert not link.requests
    assert len(told.reports) == 1


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("stops", [False, True])
def test_an_average_that_overflows_is_told_as_that(stops: bool) -> None:
    """As where a codec rounds to infinity, or a sum of sites leaves float32."""
    told = Told(stops=stops)

    class Overflows(AloneLink):
        def reduce(self, request: Reduce) -> None:
            self._regions[request.region][request.offset + 3] = INF
            super().reduce(request)

    with lone_exchange(Overflows(), finite=told.watch) as exchange:
        values = torch.ones(4)
        exchange.begin(1.0, RoundTerms(is_gradient=True))
        exchange.submit([values], layout=0, named=[("a", values[:2]), ("b", values[2:])])
        if stops:
            with pytest.raises(NonFiniteError, match="the average over sites of the gradient of b"):
                exchange.wait()
        else:
            exchange.wait()
    ((tensor, reason, is_averaged),) = told.reports
    assert (tensor, is_averaged) == ("b", True)
    assert "held an infinity, though each rank's gradient was finite" in reason


class LateTransfer(Transfer):
    """As on CUDA: whether values are finite is known once they have been reduced."""

    device = torch.device("meta")


@pytest.mark.usefixtures("process_group")
def test_on_a_device_it_is_told_once_the_values_are_there() -> None:
    told = Told()
    transfer = LateTransfer(Collectives(LONG_S))
    with lone_exchange(AloneLink(), transfer, finite=told.watch) as exchange:
        exchange.begin(1.0, RoundTerms(is_gradient=True))
        bad = torch.tensor([1.0, NAN])
        exchange.submit([bad], layout=0, named=[("w", bad)])
        exchange.wait()
    assert [tensor for tensor, _, _ in told.reports] == ["w"]


def reports(
    folder: Path, layouts: tuple[str, str], parameter: str, rank: str, *, job: Sequence[str] = ()
) -> list[tuple[str, int, dict[str, Any]]]:
    plan = {"layouts": layouts, "parameter": parameter, "rank": rank}
    (folder / "layouts.json").write_text(json.dumps(plan))
    ranks = [layout_programs.RANKS[each] for each in layouts]
    with FakeGateways(folder, ranks, verify_every=0) as gateways:
        paths = [gateways.path(site) for site in range(len(ranks))]
        codes = run_ranks(folder, paths, ranks, layout_programs.train_not_finite, job)
    assert set(codes.values()) == {0}
    assert gateways.problems == []
    kind = metrics.NON_FINITE
    return [each for each in gateways.metrics if each[2]["kind"] == kind]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_rank_with_a_nan_in_one_parameter_is_named_and_no_other(tmp_path: Path) -> None:
    told = reports(tmp_path, ("ddp", "ddp"), "layers.1.up.weight", "site1-rank1")
    own = [each for each in told if each[2]["step"] == 2 and not each[2]["values"]["averaged"]]
    ((site, rank, message),) = own
    assert (site, rank) == ("site1", 1)
    assert message["labels"] == {
        "tensor": "layers.1.up.weight",
        "reason": "in step 2 the gradient of layers.1.up.weight held a NaN before it was averaged",
    }


@pytest.mark.slow
@pytest.mark.multiprocess
def test_where_rounds_have_several_steps_the_site_with_a_nan_is_named(tmp_path: Path) -> None:
    """What crosses are values then; a NaN of the first steps is in them at the round's end."""
    job = ["regime.kind=diloco", "regime.sync_every=3"]
    told = reports(tmp_path, ("ddp", "ddp"), "layers.1.up.weight", "site1-rank1", job=job)
    own = [each for each in told if not each[2]["values"]["averaged"]]
    assert {site for site, _, _ in own} == {"site1"}
    for _, _, message in own:
        assert message["step"] == 3
        assert message["labels"]["reason"].startswith("in step 3 its shard of the site's value of")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "rank", ["site0-rank1", pytest.param("site1-rank2", marks=pytest.mark.exhaustive)]
)
def test_of_sharded_gradients_the_site_is_named(tmp_path: Path, rank: str) -> None:
    told = reports(tmp_path, ("fsdp2", "tp"), "", rank)
    own = [each for each in told if each[2]["step"] == 2 and not each[2]["values"]["averaged"]]
    assert own
    assert {site for site, _, _ in own} == {rank.split("-")[0]}
    for _, _, message in own:
        assert "in step 2 its shard of the site's gradient of" in str(message["labels"])
    assert np.all([message["step"] in {2, 3} for _, _, message in told])
