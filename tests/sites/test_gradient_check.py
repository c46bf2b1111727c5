"""Ranks that compute one micro-batch, compare, and go on with all as it was: in one process."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from isthmus.protos.errors import GradientsDifferError
from isthmus.sites.worker.checks import gradient_check, replay
from isthmus.sites.worker.checks.gradient_check import GradientCheck, OwnArithmetic, Seats

WAIT_S = 60.0


class Net(nn.Module):
    """Has what a replay may disturb: statistics, random numbers, attributes, an odd buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.head = nn.Linear(6, 2)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: list[int] = []
        self.latest: torch.Tensor | None = None
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, inputs: torch.Tensor, scale: float = 1.0, **more: object) -> dict[str, Any]:
        self.calls += 1
        self.seen.append(1 + max(self.seen, default=0))
        del self.seen[:-3]
        self.latest = self.body(inputs * scale) + random.random() + float(np.random.rand())
        noise = torch.rand((), generator=self.generator)
        return {"out": self.head(self.latest) * noise, "more": more}


class Exchange:
    """Has threads that are ranks tell each other, one of which computes at a time."""

    def __init__(self, num_ranks: int) -> None:
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(num_ranks)
        self._told: list[Any] = [None] * num_ranks

    def meet(self, place: int, value: object) -> list[Any]:
        self._told[place] = value
        self.turn.release()
        try:
            self._barrier.wait(WAIT_S)
            told = list(self._told)
            self._barrier.wait(WAIT_S)
        finally:
            self.turn.acquire()
        return told

    def leave(self) -> None:
        self._barrier.abort()


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(pipeline: Exchange, value: object, *, site: int, **_: object) -> list[Any]:
        return pipeline.meet(site, value)

    monkeypatch.setattr(gradient_check, "tell_all", tell)
    monkeypatch.setattr(gradient_check, "tell_hashes", tell)


class Rank:
    """One rank, with a model of its own."""

    def __init__(self, exchange: Exchange, model: nn.Module, place: int, sizes: list[int]) -> None:
        self.model, self.place, self.steps = model, place, 0
        self.recorded: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self.check = GradientCheck(
            exchange,  # type: ignore[arg-type]
            [model],
            {each: name for name, each in model.named_parameters()},
            torch.device("cpu"),
            seats=Seats(sites=["a", "b", "c"][: len(sizes)], ranks_per_site=sizes, own=place),
            own=OwnArithmetic(kind="cpu", place="node 0, host h", repeats=True),
            every=2,
            num_steps=lambda: self.steps,
            gone=frozenset,
            global_parameters=contextlib.nullcontext,
            note=self.notes.append,
            record=lambda step, ranks, _: self.recorded.append((step, ranks)),
        )

    def step(self, *args: object, **kwargs: object) -> None:
        self.model(*args, **kwargs)
        self.steps += 1
        self.check.after_step(self.steps)


def run(
    sizes: list[int],
    program: Callable[[Rank], None],
    make: Callable[[], nn.Module] = Net,
    *,
    within_s: float = WAIT_S,
) -> list[tuple[Rank, BaseException | None]]:
    """Run a program in all ranks; return each with how it ended."""
    torch.manual_seed(0)
    first = make()
    exchange = Exchange(sum(sizes))
    ranks = [Rank(exchange, copy.deepcopy(first), at, sizes) for at in range(sum(sizes))]
    ends: dict[int, BaseException | None] = {}

    def work(rank: Rank) -> None:
        ends[rank.place] = None
        with exchange.turn:
            try:
                program(rank)
            except GradientsDifferError as error:
                ends[rank.place] = error
            except BaseException as error:  # noqa: BLE001 - a thread's root: told by the test
                ends[rank.place] = error
                exchange.leave()

    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in ranks]
    for each in threads:
        each.start()
    for each in threads:
        each.join(within_s)
    assert len(ends) == len(ranks)
    return [(each, ends[each.place]) for each in ranks]


def inputs(place: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * place + step)
    return torch.randn(5, 4, generator=generator)


def flip_from(rank: Rank, step: int, *, only: int | None = None) -> None:
    """Have one bit of one gradient be wrong from a step on, or in one pass after that."""
    passes = 0

    def flip(grad: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        if rank.steps < step:
            return grad
        passes += 1
        if only is not None and passes != only:
            return grad
        grad = grad.clone()
        grad.view(torch.int32)[0, 0] ^= 1
        return grad

    dict(rank.model.named_parameters())["head.weight"].register_hook(flip)  # type: ignore[no-untyped-call]


def steps_of(rank: Rank, count: int) -> None:
    for step in range(count):
        rank.step(inputs(rank.place, step), scale=1.0 + rank.place)


# ---------------------------------------------------------------- found, or not


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 1], [3]])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_flipped_bit_is_found_at_its_rank(sizes: list[int], wrong: int) -> None:
    def program(rank: Rank) -> None:
        if rank.place == wrong:
            flip_from(rank, 3)
        for step in range(4):
            rank.step(inputs(rank.place, step))

    for rank, error in run(sizes, program):
        if rank.place != wrong:
            assert error is None
            continue
        assert isinstance(error, GradientsDifferError)
        assert f"after step 4, {rank.check._seats.name(wrong)} (node 0, host h) computed" in str(
            error
        )
        assert "head.weight differed by up to" in str(error)
        assert "each time, from what 2 other ranks computed" in str(error)


@pytest.mark.parametrize(("only", "said"), [(1, "one time of two"), (2, "one time of two")])
def test_a_rank_that_is_wrong_once_is_told_by_the_repetition(only: int, said: str) -> None:
    def program(rank: Rank) -> None:
        if rank.place == 1:
            flip_from(rank, 2, only=only)
        elif rank.place == 0:  # else the second computation would not be asked for
            flip_from(rank, 99)
        steps_of(rank, 2)

    first, second = run([1, 1], program)
    if only == 2:  # nothing differed, so nothing was repeated
        assert (first[1], second[1]) == (None, None)
        return
    assert first[1] is None
    assert isinstance(second[1], GradientsDifferError)
    assert said in str(second[1])


def test_of_two_ranks_nothing_tells_which_is_right() -> None:
    def program(rank: Rank) -> None:
        if rank.place == 1:
            flip_from(rank, 0)
        steps_of(rank, 2)

    errors = [str(error) for _, error in run([1, 1], program)]
    assert "rank 0 of site a (node 0, host h) and rank 0 of site b" in errors[0]
    assert "rank 0 of site b (node 0, host h) and rank 0 of site a" in errors[1]
    assert all("no third rank tells which is right" in each for each in errors)


@pytest.mark.parametrize(
    "count", [100, pytest.param(10_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)])]
)
def test_nothing_is_found_in_clean_steps_and_every_micro_batch_has_its_turn(count: int) -> None:
    found = run([1, 1], lambda rank: steps_of(rank, count), within_s=550.0)
    assert [error for _, error in found] == [None, None]
    for rank, _ in found:
        assert rank.recorded == [(step, 2) for step in range(2, count + 1, 2)]
        assert not rank.notes


# ---------------------------------------------------------------- all as it was


def state_of(model: nn.Module) -> dict[str, Any]:
    assert isinstance(model, Net)
    return {
        "parameters": [each.clone() for each in model.parameters()],
        "buffers": [each.clone() for each in model.buffers()],
        "grads": [None if each.grad is None else each.grad.clone() for each in model.parameters()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "own": model.generator.get_state(),
        "seen": list(model.seen),
        "latest": None if model.latest is None else model.latest.clone(),
        "modes": [each.training for each in model.modules()],
        "keys": [sorted(vars(each)) for each in model.modules()],
        "cache": torch.is_autocast_cache_enabled(),
    }


def are_equal(one: Any, other: Any) -> bool:  # noqa: ANN401 - whatever a state holds
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list) and one and any(isinstance(each, torch.Tensor) for each in one):
        return all(map(are_equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("trains", [True, False])
def test_gradients_buffers_and_random_numbers_are_what_they_were(trains: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    model.body[1].eval()
    model(inputs(0, 0))["out"].sum().backward()
    own = [each.grad for each in model.parameters()]
    model.train(trains)
    with torch.autocast("cpu", torch.bfloat16):
        sample = replay.packed_sample(0, model, [inputs(0, 1)], {"scale": 0.5})
    model.train()
    model.body[1].eval()
    before = state_of(model)
    names: dict[torch.Tensor, str] = {each: name for name, each in model.named_parameters()}
    again = replay.Replay([model], names, torch.device("cpu"))

    def computed(step: int) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}

        def take(at: int, grad: torch.Tensor) -> None:
            found[at] = grad.clone()

        again.compute(sample, step, take)
        return found

    taken = []
    for _ in range(2):
        taken.append(computed(3))
        after = state_of(model)
        for key, value in before.items():
            assert are_equal(value, after[key]), key
    assert all(one is each.grad for one, each in zip(own, model.parameters(), strict=True))
    assert {again.names[each] for each in taken[0]} == {*names.values()} - {"unused"}
    assert all(torch.equal(each, taken[1][at]) for at, each in taken[0].items())
    assert not torch.equal(computed(4)[1], taken[0][1]), "another step draws other numbers"


class Fails(nn.Linear):
    """Cannot be computed again."""

    fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("CUDA out of memory")
        return super().forward(inputs)


@contextlib.contextmanager
def failing(model: Fails) -> Iterator[None]:
    model.fails = True
    yield
    model.fails = False


def test_a_rank_that_cannot_compute_says_so_once_and_others_compare() -> None:
    def program(rank: Rank) -> None:
        assert isinstance(rank.model, Fails)
        for step in range(8):
            rank.model(inputs(rank.place, step))
            rank.steps += 1
            with failing(rank.model) if rank.place == 2 else contextlib.nullcontext():
                rank.check.after_step(rank.steps)

    found = run([1, 2], program, lambda: Fails(4, 2))
    assert [error for _, error in found] == [None] * 3
    assert [rank.recorded[-1] for rank, _ in found] == [(8, 2)] * 3
    assert found[2][0].notes == [
        "rank 1 of site b compares no gradients: RuntimeError: CUDA out of memory"
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (threading.Lock(), "is called with more than tensors and plain values"),
        (torch.zeros(replay.SAMPLE_BYTES // 4 + 1), "takes 32 MiB, and 32 MiB may be sent"),
    ],
    ids=["lock", "large"],
)
def test_what_cannot_be_sent_is_named(value: object, said: str) -> None:
    def program(rank: Rank) -> None:
        for step in range(2):
            rank.step(inputs(0, step), x=value)

    found = run([1, 1], program)
    assert [rank.recorded for rank, _ in found] == [[], []]
    assert [len(rank.notes) for rank, _ in found] == [0, 1]
    assert said in found[1][0].notes[0]


def test_a_model_without_tensors_and_unlike_large_buffers_are_named() -> None:
    class Odd(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("table", torch.zeros(1 << 19))

        def forward(self, inputs: torch.Tensor) -> Any:  # noqa: ANN401 - no tensor
            super().forward(inputs)
            return 1.0

    def program(rank: Rank) -> None:
        if rank.place == 1:
            rank.model.get_buffer("table")[0] = 1
        for step in range(2):
            rank.step(inputs(rank.place, step))

    first, second = run([1, 1], program, Odd)
    assert "buffer table is not that of another rank" in first[0].notes[0]
    assert "returns no tensor that has a gradient" in second[0].notes[0]
