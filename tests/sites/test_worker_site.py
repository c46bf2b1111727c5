"""A rank's view of its site: steps that are counted, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from isthmus.protos import metrics
from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.api.site import Site
from isthmus.topology.spec.job import Exchange
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site

LONG_S = 30.0
EIGHT = torch.ones(8)
pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def restored_default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def replica(*, bias: bool = True) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(nn.Linear(3, 1, bias=bias))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        torch.autograd.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()


def step_alone() -> None:
    """Train as a script does that has forgotten the others."""
    model = nn.Linear(3, 1)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)


def test_a_script_that_forgets_to_attach_is_told_of_while_it_trains_and_at_its_end(
    link: RecordingLink,
) -> None:
    site = lone_site(link, 2)
    step_alone()
    assert [kind for kind, _, _ in link.metrics] == [metrics.STEPPED_ALONE]
    site.leave()
    assert link.has_left
    assert not link.has_averaged


def test_a_hook_of_the_scripts_own_for_all_optimizers_runs_beside_ours() -> None:
    site = lone_site(RecordingLink(), 2)
    steps: list[object] = []
    own = register_optimizer_step_post_hook(lambda *_: steps.append(None))
    step_alone()
    assert len(steps) == 3
    site.leave()
    step_alone()
    own.remove()
    assert len(steps) == 6


@pytest.mark.parametrize(
    "average",
    [
        lambda site: site.all_reduce([torch.ones(2)]),
        lambda site: site.broadcast([torch.ones(2)]),
        lambda site: site.average_gradients(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)),
        lambda site: site.attach(*replica()),
    ],
)
def test_whatever_averages_over_sites_is_no_mistake(
    link: RecordingLink, average: Callable[[Site], None]
) -> None:
    site = lone_site(link, 2)
    average(site)
    step_alone()
    site.leave()
    assert link.has_averaged
    assert not [kind for kind, _, _ in link.metrics if kind == metrics.STEPPED_ALONE]


@pytest.mark.parametrize(
    ("num_sites", "averages", "schedule"),
    [(1, True, "overlap"), (2, False, "overlap"), (3, True, "off")],
    ids=["one site", "on purpose", "exchange off"],
)
def test_where_nothing_has_to_cross_nothing_is_missed(
    link: RecordingLink, num_sites: int, averages: bool, schedule: str
) -> None:
    site = lone_site(link, num_sites, averages=averages, exchange=Exchange(schedule=schedule))
    step_alone()
    site.leave()
    assert link.has_averaged
    assert not link.metrics


def test_steps_are_counted_and_logged(site: Site, link: RecordingLink) -> None:
    model, optimizer = replica()
    with pytest.raises(RuntimeError, match="no completed optimizer step"):
        site.log(loss=1.0)
    site.attach(model, optimizer)
    with pytest.raises(RuntimeError, match="already"):
        site.attach(model, optimizer)
    for step in range(3):
        train(model, optimizer)
        if step == 0:
            site.log(loss=torch.tensor(4.0))
            site.log(late=5)
    site.leave()
    steps = [(kind, step) for kind, step, _ in link.metrics]
    assert steps == [("model", 1), ("step", 1), ("step", 1), ("step", 2), ("step", 3)]
    assert link.metrics[1][2]["loss"] == 4.0
    assert link.metrics[2][2] == {"late": 5.0}
    assert link.metrics[4][2]["step_s"] > 0.0
    assert link.steps_hashed == [0, 2]
    assert link.has_left


@pytest.mark.parametrize(
    ("rate", "scale"), [(None, 1.0), ("linear", 0.5), ("sqrt", 0.5**0.5), ("none", 1.0)]
)
def test_learning_rates_follow_the_batch_as_the_job_says(
    link: RecordingLink, rate: str | None, scale: float
) -> None:
    site = lone_site(link, 2, rate=rate)
    model, optimizer = replica()
    site.attach(model, optimizer)
    sampler = site.sampler(range(100), global_batch=8)
    site.checkpoint(model, optimizer)
    link.missing_sites.begin_amid([(1, -60)])  # all will know of it after the fourth step
    for step in range(5):
        assert len(sampler.draw()) == (8 if rate is None and step == 4 else 4)
        expected = scale if step == 4 else 1.0
        assert site.learning_rate_scale == expected
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * expected)
        train(model, optimizer)
    site.leave()


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_how_large_a_model_is_is_told_once_with_whether_tokens_count(
    site: Site, link: RecordingLink, counts: bool, by_hand: bool
) -> None:
    model = nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    trained = model if by_hand else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    if by_hand:
        site.average_gradients(optimizer)
    else:
        site.attach(trained, optimizer)
    for _ in range(2):
        if counts:
            site.count_tokens(5)
        train(trained, optimizer)
    site.leave()
    told = [values for kind, _, values in link.metrics if kind == metrics.MODEL]
    assert told == [{metrics.PARAMETERS: 3.0, metrics.COUNTS_TOKENS: float(counts)}]


def test_after_it_was_attached_again_steps_count_on_and_are_hashed_once(
    site: Site, link: RecordingLink
) -> None:
    model, former = replica()
    for optimizer in (former, torch.optim.SGD(model.parameters(), lr=0.1)):
        site.attach(model, optimizer)
        train(model, optimizer, 2)
    former.step()  # it counts no more
    site.leave()
    steps = [step for kind, step, _ in link.metrics if kind == "step"]
    assert steps == [1, 2, 3, 4]
    assert link.steps_hashed == [0, 2, 4]


def test_what_is_no_optimizer_is_refused(site: Site) -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got str"):
        site.attach(replica()[0], "sgd")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got Linear"):
        site.average_gradients(nn.Linear(2, 2))  # type: ignore[arg-type]


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
        (
            [EIGHT[5:], torch.ones(3), EIGHT[:2], EIGHT[2:6]],
            ValueError,
            r"tensors\[0\] and tensors\[3\] have elements in common",
        ),
    ],
    ids=["no list", "a number", "integers", "sparse", "twice", "overlapping"],
)
def test_what_cannot_be_averaged_is_refused(
    site: Site, tensors: list[torch.Tensor], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        site.all_reduce(tensors)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="0 or more"):
            site.all_reduce([torch.ones(1)], tokens=wrong)
    with pytest.raises(TypeError, match=r"site\.broadcast: want a list of tensors, got a str"):
        site.broadcast("model")  # type: ignore[arg-type]


def test_an_optimizer_with_a_closure_is_refused(site: Site) -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    site.average_gradients(optimizer)
    with pytest.raises(RuntimeError, match="with a closure"):
        optimizer.step(lambda: 0.0)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="already"):
        site.average_gradients(optimizer)


def test_without_attaching_no_round_is_made(site: Site, link: RecordingLink) -> None:
    """Accumulated micro-batches cross once."""
    model, optimizer = replica(bias=False)
    site.attach(model, optimizer)
    with model.no_sync():
        site.count_tokens(10)
        torch.autograd.backward(model(torch.ones(2, 3)).sum())
    site.count_tokens(7)
    train(model, optimizer)
    site.leave()
    assert link.metrics[1][2]["tokens"] == 17.0
    assert link.metrics[1][2]["raw_bytes"] == 12.0
    (weight,) = model.parameters()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[4.0, 4.0, 4.0]], "both micro-batches, averaged over one rank"


def test_tensors_to_average_are_float32_whatever_the_default(
    site: Site, restored_default_dtype: None
) -> None:
    torch.set_default_dtype(torch.bfloat16)
    for sizes in [(2, 3), (0, 3), ()]:
        made = site.empty(*sizes)
        assert (made.shape, made.dtype) == (sizes, torch.float32)
    with pytest.raises(ValueError, match=r"want sizes of 0 or more, got \(2, -1\)"):
        site.empty(2, -1)
    site.all_reduce([EIGHT[::2], EIGHT[1::2], site.empty(2)])


def test_a_site_that_comes_back_with_other_data_is_refused(link: RecordingLink) -> None:
    """By itself: the others, whose data are right, go on."""
    state: dict[str, Any] = {}
    for num_samples in (100, 101):
        site = lone_site(link, 2)
        data = site._parts.data
        site.sampler(range(num_samples), global_batch=8)
        if not state:
            state = data.state_for_rejoining()
            data.resume(state, lambda: None)
            continue
        with pytest.raises(ScriptError, match=r"101 samples, .* other sites have 100 samples, "):
            data.resume(state, lambda: None)
