"""The regimes `local_sgd` and `diloco` at two sites: as one process does it, in any layout."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import backward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos import metrics
from isthmus.protos.checkpoint.store import checkpoint_name
from isthmus.protos.errors import NonFiniteError, ScriptError
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.collectives import ensure_process_group
from isthmus.sites.worker.exchange.sharding import local_of, whole_of, write_whole
from isthmus.sites.worker.regimes.streaming import Streaming
from isthmus.topology.spec.job import Exchange
from isthmus.topology.spec.regime import OuterOptimizer, regime_of
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site
from tests.fakes.two_sites import bits_of, check_digests, check_equal, run
from tests.sites import layout_programs as programs
from tests.sites import test_sharded_checkpoints as saved
from tests.sites.test_worker_layouts import write_plan

LAYOUTS = ["fsdp3", "tp", "hsdp", "ep", "pp", "ddp", "lone", "lone-tp", "lone-pp"]
DILOCO = OuterOptimizer(lr=0.7, momentum=0.9, ramp_steps=5)
CASES = [
    ("lone", "fsdp2", 3, DILOCO),
    pytest.param("ddp", "fsdp2", 3, DILOCO, marks=pytest.mark.exhaustive),
    pytest.param("fsdp2", "fsdp2", 1, DILOCO, marks=pytest.mark.exhaustive),
    pytest.param("ddp", "ddp", 3, None, marks=pytest.mark.exhaustive),
    *(
        pytest.param(*pair, 3, DILOCO, marks=pytest.mark.exhaustive)
        for pair in itertools.combinations_with_replacement(LAYOUTS, 2)
    ),
]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("first", "second", "sync_every", "outer"), CASES)
def test_two_layouts_train_as_one_process_does(
    tmp_path: Path, first: str, second: str, sync_every: int, outer: OuterOptimizer | None
) -> None:
    """Losses and norms are those of the oracle; after a round all ranks hold the same."""
    layouts, num_steps = [first, second], 3 * sync_every + 2
    write_plan(tmp_path, (first, second), num_steps)
    ranks = [programs.RANKS[each] for each in layouts]
    kind = "local_sgd" if outer is None else "diloco"
    regime = regime_of(kind, sync_every=sync_every, outer=outer or OuterOptimizer())
    job = ["exchange.bucket=64KiB", f"regime.kind={kind}", f"regime.sync_every={sync_every}"]
    job += [
        f"regime.outer.{key}={value}"
        for key, value in (dataclasses.asdict(outer) if outer else {}).items()
    ]
    saved, gateways = run(tmp_path, programs.train, ranks, job=job)
    digests = [each[2] for each in gateways.digests]
    check_digests(digests, num_steps, sum(ranks), every=sync_every)
    wanted, norms = programs.reference_local_steps(layouts, num_steps, regime)
    check_trained(saved, layouts, wanted, norms)


def check_trained(
    saved: Mapping[str, Any],
    layouts: Sequence[str],
    wanted: list[list[float]],
    norms: list[list[float]],
) -> None:
    """Compare what ranks saved with an oracle's losses and norms."""
    place = 0
    for site, layout in enumerate(layouts):
        own = [each for name, each in saved.items() if name.startswith(f"site{site}-")]
        for each in own:
            assert each["norms"] == pytest.approx([of[site] for of in norms], rel=1e-4)
            assert each["norms"] == own[0]["norms"], "the same bits"
        for at in range(programs.DATA_RANKS[layout]):
            of_rank = [each["losses"] for each in own if each["place"] == at]
            found = [*map(sum, zip(*of_rank, strict=True))]
            copies = 2 if layout.startswith(("tp", "lone-")) else 1
            assert found == pytest.approx([each[place] * copies for each in wanted], rel=1e-4)
            place += 1


STREAMS = [
    ("ddp", "fsdp2", 2, 1, 0.5),
    *(
        pytest.param(*pair, *case, marks=pytest.mark.exhaustive)
        for pair in [("fsdp3", "pp"), ("tp", "lone"), ("hsdp", "ep"), ("lone-pp", "ddp")]
        for case in [(2, 0, 0.0), (2, 2, 0.5), (3, 1, 0.0), (6, 0, 0.5)]
    ),
]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("first", "second", "fragments", "delay", "alpha"), STREAMS)
def test_fragments_land_as_in_one_process(
    tmp_path: Path, first: str, second: str, fragments: int, delay: int, alpha: float
) -> None:
    layouts, num_steps = [first, second], 15
    write_plan(tmp_path, (first, second), num_steps)
    outer = OuterOptimizer(lr=0.7, momentum=0.9, ramp_steps=5)
    regime = regime_of(
        "streaming", sync_every=6, outer=outer, fragments=fragments, delay=delay, alpha=alpha
    )
    job = ["exchange.bucket=64KiB", "regime.kind=streaming", "regime.sync_every=6"]
    job += [f"regime.fragments={fragments}", f"regime.delay={delay}", f"regime.alpha={alpha}"]
    job += [f"regime.outer.{key}={value}" for key, value in dataclasses.asdict(outer).items()]
    ranks = [programs.RANKS[each] for each in layouts]
    saved, gateways = run(tmp_path, programs.train, ranks, job=job)
    digests = [each[2] for each in gateways.digests]
    check_digests(digests, num_steps, sum(ranks), every=6)
    parts = [
        {*itertools.chain(*of)}
        for of in zip(*(each["fragments"] for each in saved.values()), strict=True)
    ]
    assert all(parts), "each fragment has something"
    assert len(parts) == min(fragments, 3), "of three buckets"
    assert sum(map(len, parts)) == len(set().union(*parts)), "and no two the same"
    parts += [set()] * (fragments - len(parts))
    wanted, norms = programs.reference_local_steps(layouts, num_steps, regime, parts)
    check_trained(saved, layouts, wanted, norms)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_sites_that_are_alike_train_as_one(tmp_path: Path, dtype: str) -> None:
    """Bit for bit, also where parameters cannot hold the global ones."""
    job = ["regime.kind=diloco", "regime.sync_every=2", "regime.outer.ramp_steps=0"]
    job += ["regime.outer.lr=0.7"]
    found = {}
    for name, ranks in [("two", [1, 1]), ("one", [1])]:
        folder = tmp_path / f"{name}-{dtype}"
        folder.mkdir()
        found[name], _ = run(folder, programs.train_moved, ranks, job=job)
    check_equal({name: {"final": each} for name, each in found["two"].items()})
    assert bits_of(found["two"]["site0-rank0"]) == bits_of(found["one"]["site0-rank0"])


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_without_inner_steps_nothing_moves(dtype: torch.dtype) -> None:
    """What begins the next round is what parameters hold, and not what they cannot."""
    regime = regime_of("diloco", sync_every=2, outer=OuterOptimizer(lr=0.7, ramp_steps=0))
    site = lone_site(RecordingLink(), regime=regime)
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(dtype)
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    site.attach(model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        backward(model(torch.ones(2, 8, dtype=dtype)).square().mean())
        optimizer.step()
    if dtype == torch.float64:
        before = [each.float().double() for each in before]
    for one, other in zip(model.parameters(), before, strict=True):
        assert torch.equal(one, other)
    site.leave()


SYNC_EVERY = ["regime.kind=diloco", "regime.sync_every=2", "regime.outer.ramp_steps=4"]
STREAMED = ["regime.kind=streaming", *SYNC_EVERY[1:], "regime.fragments=2", "regime.alpha=0.5"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layouts", "more", "steps"),
    [
        (("lone", "fsdp2"), SYNC_EVERY, [4]),
        *(
            pytest.param(each, *case, marks=pytest.mark.exhaustive)
            for each in [("ddp", "fsdp2"), ("pp", "tp"), ("hsdp", "ep"), ("lone", "fsdp3")]
            for case in [(SYNC_EVERY, [4]), (STREAMED, [4, 5])]
        ),
    ],
)
def test_what_was_saved_goes_on_with_the_same_bits(
    tmp_path: Path, layouts: tuple[str, str], more: list[str], steps: list[int]
) -> None:
    """Of model, inner and outer optimizer.

    A step of `diloco` after the last round is not saved. Of `streaming` the global parameters are.
    """
    whole = saved.run(tmp_path / "whole", layouts, is_noisy=True, more=more)
    resume = whole / checkpoint_name(saved.SAVED)
    resumed = saved.run(tmp_path / "resumed", layouts, resume=resume, is_noisy=True, more=more)
    found: dict[str, torch.Tensor] = {}
    written = [each.name for each in sorted(resumed.glob("step-*"))]
    assert written == [checkpoint_name(each) for each in steps]
    for step in steps:
        expected, found = (saved.everything(each, step) for each in (whole, resumed))
        assert found.keys() == expected.keys()
        assert not [name for name, each in found.items() if not torch.equal(each, expected[name])]
    names = [name for name, _ in programs.net(seed=0).named_parameters()]
    for name in names:
        assert torch.equal(found[f"outer/global/{name}"], found[f"model/{name}"])
        assert found[f"outer/momentum/{name}"].count_nonzero()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layouts", "more"),
    [
        (("lone", "ddp"), SYNC_EVERY),
        pytest.param(("lone", "lone"), STREAMED, marks=pytest.mark.exhaustive),
        pytest.param(("fsdp2", "ddp"), SYNC_EVERY, marks=pytest.mark.exhaustive),
    ],
)
def test_what_a_site_has_not_used_is_saved_and_goes_on_with_the_same_bits(
    tmp_path: Path, layouts: tuple[str, str], more: list[str]
) -> None:
    """One optimizer has no state at one site, another at the other one."""
    options: Any = {"more": more, "program": programs.train_partly_saved}
    whole = saved.run(tmp_path / "whole", layouts, **options)
    resume = whole / checkpoint_name(saved.SAVED)
    resumed = saved.run(tmp_path / "resumed", layouts, resume=resume, **options)
    expected, found = (saved.everything(each, 4) for each in (whole, resumed))
    assert found.keys() == expected.keys()
    assert not [name for name, each in found.items() if not torch.equal(each, expected[name])]
    kept = {name for name in found if name.startswith("optimizer/")}
    assert {f"optimizer/of_site.{each}.weight/{key}" for each, key in KEPT} < kept


KEPT = [(0, "momentum_buffer"), (1, "exp_avg"), (1, "exp_avg_sq"), (1, "step")]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("more", "steps"),
    [
        (SYNC_EVERY, [4, 6]),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in [
                (["regime.kind=local_sgd", *SYNC_EVERY[1:2]], [4, 6]),
                (STREAMED, [4, 6, 7]),
                (["regime=delayed"], [3, 6, 7]),
            ]
        ),
    ],
)
def test_a_resumed_run_saves_at_the_same_steps_with_the_same_bits(
    tmp_path: Path, more: list[str], steps: list[int]
) -> None:
    """Where the interval, three steps, is no multiple of a round's."""
    options: Any = {"more": [*more, "checkpoint.every=3 steps"], "num_steps": 7, "start": steps[0]}
    whole = saved.run(tmp_path / "whole", ("lone", "lone"), **options)
    resume = whole / checkpoint_name(steps[0])
    resumed = saved.run(tmp_path / "resumed", ("lone", "lone"), resume=resume, **options)
    for store, wanted in [(whole, steps), (resumed, steps[1:])]:
        written = [each.name for each in sorted(store.glob("step-*"))]
        assert written == [*map(checkpoint_name, wanted)]
    for step in steps[1:]:
        expected, found = (saved.everything(each, step) for each in (whole, resumed))
        assert found.keys() == expected.keys()
        assert not [name for name, each in found.items() if not torch.equal(each, expected[name])]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "after",
    [
        ("lone", "ddp", "lone"),
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in [("ddp", "fsdp2", "lone"), ("fsdp3",)]
        ),
    ],
)
def test_another_number_of_sites_goes_on(tmp_path: Path, after: tuple[str, ...]) -> None:
    whole = saved.run(tmp_path / "whole", ("fsdp2", "lone"), more=SYNC_EVERY)
    resume = whole / checkpoint_name(saved.SAVED)
    other = saved.run(tmp_path / "other", after, resume=resume, more=SYNC_EVERY)
    expected, found = (saved.everything(each, 4) for each in (whole, other))
    assert found.keys() == expected.keys()
    for name in expected:
        if name.startswith("outer/"):
            torch.testing.assert_close(found[name], expected[name], rtol=0.1, atol=0.02, msg=name)


def lone_steps(num_steps: int) -> tuple[Site, nn.Module, torch.optim.Optimizer]:
    """Return a lone site of rounds of three steps that has taken some."""
    regime = regime_of("diloco", sync_every=3, outer=OuterOptimizer(lr=0.5, ramp_steps=0))
    site = lone_site(RecordingLink(), regime=regime)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    for _ in range(num_steps):
        train_once(model, optimizer)
    return site, model, optimizer


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()


@pytest.mark.usefixtures("process_group")
def test_global_parameters_are_those_of_the_latest_round() -> None:
    """Also before the first one; in the context, and nowhere else."""
    initial, after = (bits_of(lone_steps(each)[1].state_dict()) for each in (0, 3))
    for num_steps, wanted in [(0, initial), (2, initial), (3, after), (4, after)]:
        site, model, optimizer = lone_steps(num_steps)
        own = bits_of(model.state_dict())
        with site.global_parameters(), site.global_parameters():
            assert bits_of(model.state_dict()) == wanted
            if num_steps % 3:
                with pytest.raises(ScriptError, match="steps inside it"):
                    train_once(model, optimizer)
        assert bits_of(model.state_dict()) == own
        assert (own == wanted) == (num_steps % 3 == 0)
        site.leave()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "streaming"])
def test_rounds_begin_with_what_the_first_pass_computed_at(kind: str) -> None:
    """As of sharpness-aware minimisation, which moves parameters there and back, by rounding."""
    regime = regime_of(kind, sync_every=4, fragments=1 if kind == "streaming" else None)
    site = lone_site(RecordingLink(), regime=regime)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    before = bits_of(model.state_dict())
    backward(model(torch.ones(2, 4)).square().mean())
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1000.0).sub_(1000.0)
    assert bits_of(model.state_dict()) != before
    optimizer.step()
    with site.global_parameters():
        assert bits_of(model.state_dict()) == before
    site.leave()


@pytest.mark.usefixtures("process_group")
def test_what_is_not_alike_at_all_sites_is_refused_or_its_own() -> None:
    site, model, optimizer = lone_steps(1)
    assert site.grad_norm > 0.0
    with pytest.raises(RuntimeError, match="regime is diloco, which needs"):
        site.average_gradients(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    backward(scaler.scale(model(torch.ones(2, 4)).square().mean()))
    with pytest.raises(ScriptError, match="a GradScaler leaves out steps at one site"):
        scaler.step(optimizer)
    site.leave()


@pytest.mark.usefixtures("process_group")
def test_what_has_moved_counts_where_something_else_is_attached() -> None:
    """It is a round then, and its result what the other optimizer begins with."""
    site, model, _ = lone_steps(4)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [each.detach().clone() for each in model.parameters()]
    site.attach(model, other)
    assert not all(map(torch.equal, model.parameters(), before)), "the outer step was taken"
    train_once(model, other)
    site.leave()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "streaming"])
@pytest.mark.parametrize(
    ("way", "loss"),
    [
        ("lone", "mean"),
        ("lone", "sum"),
        ("ddp", "mean"),
        ("ddp", "sum"),
        ("fsdp2", "mean"),
        ("fsdp2", "sum"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_over_no_tokens_counts_for_nothing(
    kind: str, way: str, loss: Literal["mean", "sum"], value: float
) -> None:
    """It is zeros then: a site of one rank has nobody whose gradient takes its place."""
    regime = regime_of(kind, sync_every=2)
    site = lone_site(RecordingLink(), regime=regime)
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 1)
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        if loss == "sum":
            model.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer, loss=loss)
    for step in range(6):
        optimizer.zero_grad()
        before = [*map(torch.clone, locals_of(model.parameters()))]
        is_bad = step in (2, 5)
        inputs = torch.full((2, 4), value if is_bad else 1.0 + step)
        site.count_tokens(0 if is_bad else 2)
        backward(model(inputs).square().mean())
        optimizer.step()
        if step == 2 and kind != "streaming":
            assert all(map(torch.equal, before, locals_of(model.parameters())))
    assert all(bool(each.isfinite().all()) for each in locals_of(model.parameters()))
    site.leave()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "streaming"])
def test_rounds_without_a_token_move_nothing(kind: str) -> None:
    """Of sites that have just caught up, none has a token, and they may be the only ones left."""
    regime = regime_of(kind, sync_every=2)
    site = lone_site(RecordingLink(), regime=regime)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    loop = site._parts.regimes.loop
    before: list[torch.Tensor] = []

    def save(step: int) -> None:
        if step % 2 == 0:
            assert loop.make_common()

    site._parts.rank.steps.listen(save)
    for step in range(4):
        if step == 2:
            before = [*map(torch.clone, model.parameters())]
        optimizer.zero_grad()
        site.count_tokens(0 if step >= 2 else 2)
        backward(model(torch.full((2, 4), 1.0 + step)).square().mean())
        optimizer.step()
    moments = [optimizer.state[each]["exp_avg_sq"] for each in model.parameters()]
    assert all(bool(each.any()) for each in moments)
    if kind == "local_sgd":
        assert all(map(torch.equal, before, model.parameters()))
    site.leave()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["delayed", "local_sgd", "diloco", "streaming"])
@pytest.mark.parametrize("inputs", [1, 8])
def test_the_hash_of_a_gradient_tells_sites_data_apart(kind: str, inputs: int) -> None:
    """Also where a parameter has one element, as the bias of a critic."""
    regime = regime_of(kind, sync_every=None if kind == "delayed" else 2)
    found = []
    for seed in (0, 0, 1):
        link = RecordingLink()
        site = lone_site(link, regime=regime)
        torch.manual_seed(0)
        model = nn.Linear(inputs, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        site.attach(model, optimizer)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model(torch.randn(4, inputs, generator=generator)).mean())
            optimizer.step()
        site.leave()
        records = [values for of, _, values in link.metrics if of == metrics.STEP]
        found.append([each[metrics.GRADIENT_HASH] for each in records])
    assert found[0] == found[1]
    assert all(one and one != other for one, other in zip(found[0], found[2], strict=True))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("use", ["evaluate", "save", "evaluate-module"])
@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "streaming"])
def test_who_evaluates_or_saves_what_only_one_site_has_is_told_once(kind: str, use: str) -> None:
    link = RecordingLink()
    regime = regime_of(kind, sync_every=4, fragments=2 if kind == "streaming" else None)
    site = lone_site(link, regime=regime)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)

    def used() -> None:
        with torch.no_grad():
            match use:
                case "evaluate":
                    model(torch.ones(2, 4))
                case "evaluate-module":
                    model.module(torch.ones(2, 4))
                case "save":
                    model.state_dict()

    used()
    for step in range(1, 8):
        train_once(model, optimizer)
        with site.global_parameters():
            used()
        assert not troubles(link)
        if step == 4 and kind != "streaming":
            used()  # a round has just ended
    used()
    used()
    (told,) = troubles(link)
    assert told.startswith(f"regime {kind}: after step 7 the model ")
    assert "inside `with site.global_parameters():`" in told
    site.leave()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("sync_every", "fragments", "delay"),
    [(1, 1, 0), (2, 1, 0), (2, 2, 0), (4, 2, 1), (4, 2, 0), (4, 1, 2)],
)
def test_fragments_of_any_number_have_a_state_of_all_sites(
    sync_every: int, fragments: int, delay: int
) -> None:
    """Also where there is one, which lands with the step that is saved."""
    regime = regime_of("streaming", sync_every=sync_every, fragments=fragments, delay=delay)
    site = lone_site(RecordingLink(), regime=regime)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    loop = site._parts.regimes.loop
    assert isinstance(loop, Streaming)

    def save(step: int) -> None:
        if step % sync_every == 0:
            assert loop.make_common()
            for name, each in model.named_parameters():
                assert torch.equal(loop.tensors()[f"global/{name}"], each)

    site._parts.rank.steps.listen(save)
    for _ in range(3 * sync_every):
        train_once(model, optimizer)
    site.leave()


def troubles(link: RecordingLink) -> list[str]:
    return [reason for kind, reason in link.reasons if kind == metrics.TROUBLE]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "streaming"])
def test_a_value_that_is_not_finite_is_told_with_the_step_in_which_gradients_were(
    kind: str,
) -> None:
    link = RecordingLink()
    regime = regime_of(kind, sync_every=4, fragments=1 if kind == "streaming" else None)
    site = lone_site(link, regime=regime, exchange=Exchange(non_finite="stop"))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    for step in range(1, 5):
        optimizer.zero_grad()
        backward(model(torch.full((2, 4), math.nan if step == 2 else 1.0)).square().mean())
        if step == 4:
            with pytest.raises(NonFiniteError, match=r"value of .*; .* not finite first in step 2"):
                optimizer.step()
        else:
            optimizer.step()
    ((of, reason),) = link.reasons
    assert of == metrics.NON_FINITE
    sent_in = 5 if kind == "streaming" else 4
    assert reason.startswith(f"in step {sent_in} the value of weight held a NaN")
    assert "step 2" in reason
    site.leave()


def sharded(device: str) -> tuple[Site, nn.Module, torch.optim.Optimizer]:
    """Return a lone site of rounds of two steps with a model of bf16 shards."""
    regime = regime_of("diloco", sync_every=2, outer=OuterOptimizer(lr=0.5, ramp_steps=0))
    site = lone_site(RecordingLink(), regime=regime, device=device)
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device, torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh(device, (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    return site, model, optimizer


def train_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs = torch.ones(2, 4, device=next(model.parameters()).device, dtype=torch.bfloat16)
        backward(model(inputs * (step + 1)).square().mean())
        optimizer.step()


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local_of(each).cpu().clone() for each in tensors]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_what_is_taken_over_goes_on_as_where_it_was_taken(device: str) -> None:
    """The state lies on the host, and is made whole where others are to have it."""
    ensure_process_group(torch.device(device), 30.0)
    site, model, optimizer = sharded(device)
    train_sharded(model, optimizer, 3)
    own = locals_of(model.parameters())
    with site.global_parameters():
        common = locals_of(model.parameters())
    assert not any(map(torch.equal, own, common))
    assert all(map(torch.equal, own, locals_of(model.parameters())))
    train_sharded(model, optimizer, 1)
    loop = site._parts.regimes.loop
    assert loop.make_common()
    parameters = [local_of(each).clone() for each in model.parameters()]
    moments = deepcopy(optimizer.state_dict())
    state = {path: whole_of(each).cpu() for path, each in loop.tensors().items()}
    assert {local_of(each).device.type for each in loop.tensors().values()} == {"cpu"}
    assert {each.dtype for each in state.values()} == {torch.float32}
    train_sharded(model, optimizer, 2)
    expected = locals_of(model.parameters())
    site.leave()

    site, model, optimizer = sharded(device)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), parameters, strict=True):
            local_of(parameter).copy_(value)
    optimizer.load_state_dict(moments)
    loop = site._parts.regimes.loop
    targets = loop.to_load({path: (each.shape, each.dtype) for path, each in state.items()})
    for path, target in targets.items():
        write_whole(target, state[path])
    loop.take(targets)
    train_sharded(model, optimizer, 2)
    assert all(map(torch.equal, expected, locals_of(model.parameters())))
    site.leave()
    dist.destroy_process_group()
