"""Plan files: round trips, strictness, whom they were made for, and what they say."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest

from isthmus.topology.documents.load import load_topology
from isthmus.topology.planner.document import PlanFile, plan_text
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.hashing import plan_hashes
from isthmus.topology.spec.job import Exchange, Job, LinkCodec, NamedTree, Reduction
from isthmus.topology.spec.plan_wishes import PlanWishes, Replan
from isthmus.topology.spec.world import Topology
from isthmus.topology.text.yaml_document import read_with_overrides
from tests.fakes.plannable import a_job, a_random_world, a_world

LINKS = [(0, 1, 2e5, 0.02), (0, 2, 1e4, 0.15), (1, 2, 1e4, 0.15)]
WORLD = a_world([4e7, 2e7, 2e7], LINKS, price=2.0, egress=1e-10)
JOB = a_job(codecs=("fp32", "int8"))


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """The plan of JOB for WORLD."""
    return make_plan(JOB, WORLD)


def said(plan: dict[str, Any]) -> str:
    return " ".join(plan["why"])


def test_what_is_written_is_read_back(made: dict[str, Any]) -> None:
    plan = PlanFile(read_with_overrides(plan_text(made), "plan.yaml", ()))
    assert plan.plain == made
    plan.check_made_for(plan_hashes(JOB, WORLD), "job.yaml", "topology.yaml")
    assert len(plan.overrides()) == 7


def test_it_tells_what_sites_take_later(made: dict[str, Any]) -> None:
    assert "While the run goes on, sequences go with the speeds that sites have." in said(made)
    assert JOB.plan is not None
    plan = dataclasses.replace(JOB.plan, sites="all")
    every = said(make_plan(dataclasses.replace(JOB, plan=plan), WORLD))
    assert re.search(r"without s0: s1 \d+, s2 \d+; without s1: s0 \d+, s2 \d+; without s2: ", every)
    fixed = dataclasses.replace(plan, sites="auto", replan=Replan(shares="fixed"))
    kept = said(make_plan(dataclasses.replace(JOB, plan=fixed), WORLD))
    assert "While the run goes on" not in kept


def test_it_explains_itself(made: dict[str, Any]) -> None:
    assert "2 of 3 sites take part" in said(made)
    assert "s2 is left out: with it, a step takes" in said(made)
    assert re.search(
        r"What limits a step: (compute at|the link|the gateway|round trips)", said(made)
    )
    by_site = {each["site"]: each for each in made["sites"]}
    assert by_site["s2"]["sequences"] == 0
    assert all(each["step_s_otherwise"] >= made["predicted"]["step_s"] for each in made["sites"])
    [link] = made["links"]
    assert link["between"] == ["s0", "s1"]
    assert link["step_s_with_one_more_gbit_s"] < made["predicted"]["step_s"]
    told = {each["what"] for each in made["alternatives"]}
    assert {"all sites", "s0 alone", "codec fp32", "equal replicas, ring"} <= told
    assert all(each["step_s"] >= made["predicted"]["step_s"] for each in made["alternatives"])
    assert made["predicted"]["usd_per_step"] > 0


def test_what_crosses_has_a_price_by_link_step_and_run(made: dict[str, Any]) -> None:
    predicted, [link] = made["predicted"], made["links"]
    usd = predicted["egress_usd_per_step"]
    assert usd == pytest.approx(predicted["egress_bytes_per_step"] * 1e-10)
    assert link["egress_usd_per_step"] == pytest.approx(usd)
    assert predicted["egress_usd_per_run"] == pytest.approx(usd * JOB.trainer.steps, rel=1e-5)
    assert predicted["fp32_egress_usd_per_step"] >= usd
    free = make_plan(JOB, a_world([4e7, 2e7, 2e7], LINKS))
    assert "egress_usd_per_step" not in free["predicted"]
    assert "egress_usd_per_step" not in free["links"][0]


def test_every_figure_has_an_origin(made: dict[str, Any]) -> None:
    links = [each for each in made["inputs"] if "→" in each["what"]]
    assert len(links) == 2 * 6
    assert {each["origin"] for each in links} == {"the topology's bandwidth", "the topology's rtt"}
    assert all(each["origin"] and each["value"] for each in made["inputs"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "replacement", "told"),
    [
        ("codec: int8", "codec: int9", r"plan.yaml:\d+:12: error: want 'fp32'"),
        ("micro_batch: 2", "micro_batch: two", "want a whole number"),
        ("version: 1", "version: 2", "want version: 1"),
        ("binding:", "bindings:", "unknown key 'bindings'"),
        ("chunk: 64KiB", "chunk: 64", "without a unit"),
        ("sequences: ", "sequence: ", "unknown key 'sequence'"),
        ("decisions:", "decisions: 3\nx:", "want a mapping"),
    ],
)
def test_mistakes_are_told_at_their_place(
    pattern: str, replacement: str, told: str, made: dict[str, Any]
) -> None:
    text = plan_text(made).replace(pattern, replacement, 1)
    with pytest.raises(ConfigError) as raised:
        PlanFile(read_with_overrides(text, "plan.yaml", ()))
    assert re.search(told, str(raised.value)), raised.value
    assert str(raised.value).startswith("plan.yaml:")


def other_job() -> Job:
    return dataclasses.replace(JOB, exchange=Exchange(codec="bf16"))


def other_world() -> Topology:
    return a_world([4e7, 2e7, 2e7], [(0, 1, 3e5, 0.02), *LINKS[1:]], price=2.0, egress=1e-10)


@pytest.mark.parametrize(
    ("job", "world", "what"), [(other_job(), WORLD, "job"), (JOB, other_world(), "topology")]
)
def test_a_plan_for_others_is_refused(
    job: Job, world: Topology, what: str, made: dict[str, Any]
) -> None:
    plan = PlanFile(read_with_overrides(plan_text(made), "plan.yaml", ()))
    with pytest.raises(ConfigError) as raised:
        plan.check_made_for(plan_hashes(job, world), "job.yaml", "t.yaml")
    assert f"made for another {what}" in str(raised.value)
    assert "isthmus plan job.yaml --out plan.yaml" in str(raised.value)
    assert "plan.yaml:5:" in str(raised.value) or "plan.yaml:4:" in str(raised.value)


def test_what_makes_no_other_plan_does_not_count() -> None:
    longer = dataclasses.replace(
        JOB, name="other", trainer=dataclasses.replace(JOB.trainer, steps=7), placement=()
    )
    emulated = dataclasses.replace(WORLD, emulate=False, emulator="auto", name="other")
    assert plan_hashes(longer, emulated) == plan_hashes(JOB, WORLD)


def test_names_that_look_like_something_else_are_quoted() -> None:
    first, second = WORLD.sites[:2]
    sites = (dataclasses.replace(first, name="1e3"), dataclasses.replace(second, name="no"))
    [link, back] = WORLD.links[:2]
    links = (
        dataclasses.replace(link, ends=("1e3", "no")),
        dataclasses.replace(back, ends=("no", "1e3")),
    )
    plan = make_plan(JOB, dataclasses.replace(WORLD, sites=sites, links=links))
    assert PlanFile(read_with_overrides(plan_text(plan), "plan.yaml", ())).plain == plan


def test_nothing_to_plan_is_refused() -> None:
    off = dataclasses.replace(JOB, exchange=dataclasses.replace(JOB.exchange, schedule="off"))
    with pytest.raises(ConfigError, match="nothing to plan"):
        make_plan(off, WORLD)
    few = dataclasses.replace(JOB, trainer=dataclasses.replace(JOB.trainer, global_batch=1))
    two = a_world([1e8, 1e8], [(0, 1, 1e8, 0.01)], ranks=[2, 3])
    with pytest.raises(ConfigError, match="want at least 2, a sequence for each rank of 's0'"):
        make_plan(few, two)
    everybody = dataclasses.replace(a_job(4), plan=PlanWishes(sites="all"))
    with pytest.raises(ConfigError, match=r"at least 5 \(s0 2, s1 3\), got 4; with `sites: auto`"):
        make_plan(everybody, two)


def test_sites_that_the_batch_is_too_small_for_are_named() -> None:
    world = a_world([4e8, 4e8, 1e8], [(0, 1, 1e9, 0.001), (0, 2, 1e9, 0.001)], ranks=[4, 4, 4])
    plan = make_plan(a_job(8), world)
    assert "2 of 3 sites take part" in said(plan)
    assert (
        "s2 is left out: each rank takes a sequence at least, and with its 4 they would be 12 for the 8"
        in said(plan)
    )


def test_a_site_that_only_a_left_out_one_joins_is_told_as_that() -> None:
    plan = make_plan(a_job(12), a_world([4e8, 1e6, 1e6], [(0, 1, 1e4, 0.2), (1, 2, 1e9, 0.001)]))
    assert "1 of 3 sites take part" in said(plan)
    assert "s1 is left out: with it, a step takes" in said(plan)
    assert (
        "s2 is left out: links both ways join it to the sites that take part only through s1, "
        "which is left out" in said(plan)
    )


def test_money_is_told_where_it_decides() -> None:
    world = a_world([4e8, 1e8], [(0, 1, 1e9, 0.001)], price=2.0, egress=1e-9)
    job = a_job(16, objective="cost")
    plan = make_plan(job, world)
    usd = plan["predicted"]["usd_per_step"]
    assert usd == pytest.approx(2.0 / 3600 * plan["predicted"]["step_s"])
    tokens = 16 * job.trainer.model.context
    assert f"A step costs {usd:.4g} USD: {usd:.4g} USD for accelerators, and 0 USD" in said(plan)
    assert f"A million tokens cost {1e6 * usd / tokens:.4g} USD" in said(plan)
    [both] = [each for each in plan["alternatives"] if each["what"] == "all sites"]
    times = both["usd_per_step"] / usd
    assert f"s1 is left out: with it, a token costs {times:.2f} times as much" in said(plan)
    fast = make_plan(a_job(16), world)
    assert "USD" not in said(fast)
    assert fast["decisions"]["placement"] != plan["decisions"]["placement"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_of_many_sites_those_go_that_the_batch_has_no_sequences_for() -> None:
    speeds = [4e8 if index % 3 else 1e8 for index in range(12)]
    links = [(one, other, 1e9, 0.001) for other in range(12) for one in range(other)]
    plan = make_plan(a_job(8), a_world(speeds, links, ranks=[2] * 12))
    taken = {each["site"] for each in plan["decisions"]["placement"]}
    assert taken <= {f"s{index}" for index in range(12) if index % 3}
    assert len(taken) == 4


MEASURED = """\
version: 1
name: two
accelerators: {chip: {peak: {bf16: 50GFLOP/s}, memory: 4GiB, mfu: 0.5}}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 1, accelerator: chip}
  - {name: b, like: a}
links:
  - between: [a, b]
    bandwidth: 10Gbit/s
    rtt: 60ms
    measured: {bandwidth: BANDWIDTH, rtt: 62ms, at: "2026-05-01T12:00:00Z"}
"""


def measured(bandwidth: str) -> Topology:
    return load_topology(MEASURED.replace("BANDWIDTH", bandwidth), "topology.yaml")


@pytest.mark.slow
def test_a_measured_figure_far_from_the_described_one_is_warned_of() -> None:
    told = make_plan(JOB, measured("7Gbit/s"))["warnings"]
    assert len(told) == 1, "one for both directions, and none of the round trip"
    assert "bandwidth 7Gbit/s was measured" in told[0]
    assert "10Gbit/s is described" in told[0]
    assert not make_plan(JOB, measured("9Gbit/s"))["warnings"]
    inputs = make_plan(JOB, measured("9Gbit/s"))["inputs"]
    origins = [each["origin"] for each in inputs]
    assert origins.count("measured at 2026-05-01T12:00:00Z") == 4


@pytest.mark.slow
def test_units_make_no_difference() -> None:
    one, other = (
        load_topology(MEASURED.replace("BANDWIDTH", text), "t.yaml")
        for text in ("1Gbit/s", "1000Mbit/s")
    )
    assert make_plan(JOB, one) == make_plan(JOB, other)


@pytest.mark.slow
def test_the_peak_that_is_told_is_the_one_that_counts() -> None:
    text = MEASURED.replace("BANDWIDTH", "9Gbit/s").replace(
        "bf16: 50GFLOP/s", "bf16: 50TFLOP/s, int8: 100TFLOP/s"
    )
    inputs = make_plan(JOB, load_topology(text, "topology.yaml"))["inputs"]
    [value] = [each["value"] for each in inputs if each["what"] == "a"]
    assert value == "1 of 50 TFLOP/s, MFU 0.5"


@pytest.mark.slow
def test_what_has_no_price_is_told_where_prices_decide() -> None:
    world = measured("9Gbit/s")
    assert not make_plan(dataclasses.replace(JOB, plan=PlanWishes()), world)["warnings"]
    [told] = make_plan(dataclasses.replace(JOB, plan=PlanWishes(objective="cost")), world)[
        "warnings"
    ]
    assert "chip has no price" in told


@pytest.mark.slow
def test_a_link_has_a_codec_of_its_own_where_that_is_as_fast_and_loses_less() -> None:
    world = a_random_world(random.Random(101), 3, density=0.8)
    near = NamedTree(root="s1", parents={"s0": "s1", "s2": "s1"}, weight=1)
    far = NamedTree(root="s2", parents={"s0": "s2", "s1": "s2"}, weight=15)
    job = a_job(5, codecs=("fp32", "bf16", "int8"))
    job = dataclasses.replace(job, reduction=Reduction(trees=(near, far)))
    plan = make_plan(job, world)
    exchange = plan["decisions"]["exchange"]
    assert exchange["codec"] == "fp32"
    assert exchange["codecs"] == [{"between": ["s0", "s2"], "codec": "int8"}]
    assert "gradients cross as fp32, and int8 between s0 and s2, by 2 trees, as" in said(plan)
    assert "codec int8" in {each["what"] for each in plan["alternatives"]}
    written = PlanFile(read_with_overrides(plan_text(plan), "plan.yaml", ()))
    assert written.plain["decisions"] == plan["decisions"]
    codecs = [each for each in written.overrides() if each.startswith("exchange.codecs=")]
    assert codecs == ['exchange.codecs=[{"between": ["s0", "s2"], "codec": "int8"}]']


@pytest.mark.slow
def test_links_that_the_job_gives_a_codec_keep_it() -> None:
    own = (LinkCodec(between=("s0", "s1"), codec="int8"),)
    job = dataclasses.replace(JOB, exchange=dataclasses.replace(JOB.exchange, codecs=own))
    plan = make_plan(job, WORLD)
    assert "codecs" not in plan["decisions"]["exchange"]
    assert not [
        each
        for each in PlanFile(read_with_overrides(plan_text(plan), "p", ())).overrides()
        if "codecs" in each
    ]


@pytest.mark.slow
def test_what_is_busy_binds_and_else_round_trips_do() -> None:
    narrow = make_plan(a_job(12, sites="all"), a_world([4e8, 4e8], [(0, 1, 1e5, 0.01)]))
    assert narrow["binding"].startswith("the link s")
    assert "all sites compute equally long, and for" in narrow["binding"]
    far = make_plan(a_job(12, sites="all"), a_world([4e10, 4e10], [(0, 1, 1e9, 0.3)]))
    assert far["binding"].startswith("round trips: the ")
    assert "busiest of all, works for" in far["binding"]
    assert said(far).count("exchange that nothing hides takes") == 1
    near = make_plan(a_job(12, sites="all"), a_world([4e6, 4e6], [(0, 1, 1e9, 0.001)]))
    assert near["binding"] == "compute at all sites"
    unlike = make_plan(a_job(11, sites="all"), a_world([4e8, 4e8], [(0, 1, 1e5, 0.01)]))
    assert re.search(r"s\d computes longest, and for", unlike["binding"])


def test_compute_that_takes_most_of_a_step_limits_it() -> None:
    job = a_job(12, sites="all")
    serial = dataclasses.replace(job.exchange, schedule="serial")
    world = a_world([4e6, 4e6], [(0, 1, 1e5, 0.01)])
    plan = make_plan(dataclasses.replace(job, exchange=serial), world)
    assert re.match(
        r"compute at all sites, 8\d(\.\d)?% of a step; for the other 1\d(\.\d)?% they wait for the "
        r"link s\d → s\d, busy for 1\d(\.\d)?% of a step$",
        plan["binding"],
    ), plan["binding"]


@pytest.mark.slow
def test_what_a_wider_link_would_buy_is_never_a_loss() -> None:
    for seed in range(2):
        plan = make_plan(a_job(8, sites="all"), a_random_world(random.Random(seed), 3))
        step_s = plan["predicted"]["step_s"]
        assert all(each["step_s_with_one_more_gbit_s"] <= step_s for each in plan["links"]), seed


def test_of_equally_fast_codecs_the_one_that_loses_least_is_chosen() -> None:
    fast = a_world([4e6, 1e8], [(0, 1, 1e9, 0.0001)])
    plan = make_plan(a_job(12, codecs=("int8", "fp32"), sites="all"), fast)
    assert plan["decisions"]["exchange"]["codec"] == "fp32"
    [other] = [each for each in plan["alternatives"] if each["what"] == "codec int8"]
    assert other["step_s"] == pytest.approx(plan["predicted"]["step_s"], rel=1e-3)


def test_one_decision_less_is_weighed() -> None:
    world = a_world([4e7, 1e7], [(0, 1, 1e6, 0.02)])
    plan = make_plan(a_job(15), world)
    told = {each["what"]: each["step_s"] for each in plan["alternatives"]}
    assert told["equal sequences on all ranks"] > 1.5 * plan["predicted"]["step_s"]
