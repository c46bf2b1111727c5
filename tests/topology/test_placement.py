"""A placement: which sites a run has, what each takes, and every mistake at its line."""

from __future__ import annotations

import pytest

from isthmus.topology.documents.run_documents import DocumentText, RunDocuments, load_run
from isthmus.topology.spec.compute import rank_share, site_shares, step_compute_s
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.hashing import config_hash
from tests.fakes.described import TWO_SITES_YAML

TOPOLOGY = """\
version: 1
name: four
accelerators: {chip: {peak: {bf16: 50GFLOP/s}, memory: 4GiB, mfu: 0.5}}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 2, accelerator: chip}
  - {name: b, like: a, accelerators_per_node: 1}
  - {name: c, like: a}
  - {name: d, like: a, accelerators_per_node: 3}
links:
  - {between: [a, b], bandwidth: 100Mbit/s, rtt: 10ms}
  - {between: [b, c], bandwidth: 100Mbit/s, rtt: 10ms}
  - {between: [c, d], bandwidth: 100Mbit/s, rtt: 10ms}
  - {between: [a, d], bandwidth: 100Mbit/s, rtt: 10ms}
"""
JOB = """\
version: 1
name: job
topology: topology.yaml
trainer: {global_batch: 13}
"""


def load(placement: str, *overrides: str, topology: tuple[str, ...] = ()) -> RunDocuments:
    text = f"{JOB}{placement}"
    return load_run(
        DocumentText(text, "job.yaml", overrides),
        DocumentText(TOPOLOGY, "topology.yaml", topology),
    )


def mistakes(placement: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(placement, *overrides)
    return [str(problem).splitlines()[0] for problem in raised.value.problems]


def test_without_one_all_sites_take_part() -> None:
    run = load("")
    assert run.topology is run.described
    assert [len(rank_share(run.job, run.topology, run.topology.sites[0], 0))] == [1]


def test_a_site_that_is_not_listed_is_not_there() -> None:
    placement = "placement: [{site: d, sequences: 8}, {site: a, sequences: 5}]\n"
    run = load(placement, topology=("failure.min_sites=4",))
    assert [(site.name, site.index) for site in run.topology.sites] == [("a", 0), ("d", 1)]
    assert {(link.source, link.target) for link in run.topology.links} == {("a", "d"), ("d", "a")}
    assert run.topology.failure.min_sites == 2
    assert len(run.described.sites) == run.described.failure.min_sites == 4


def test_ranks_take_contiguous_parts_in_the_topologys_order() -> None:
    run = load("placement: [{site: d, sequences: 8}, {site: a, sequences: 5}]\n")
    first, last = run.topology.sites
    parts = [rank_share(run.job, run.topology, first, rank) for rank in range(2)]
    parts += [rank_share(run.job, run.topology, last, rank) for rank in range(3)]
    assert [place for part in parts for place in part] == list(range(13))
    assert site_shares(run.job, run.topology, first) == (2, 3)
    assert site_shares(run.job, run.topology, last) == (2, 3, 3)
    one_s = step_compute_s(load("", "trainer.global_batch=8").job, run.described, first)
    assert step_compute_s(run.job, run.topology, first) == pytest.approx(3 * one_s)


def test_the_hash_covers_it() -> None:
    texts = [
        "placement: [{site: a, sequences: 6}, {site: b, sequences: 7}]\n",
        "placement: [{site: a, sequences: 7}, {site: b, sequences: 6}]\n",
        "",
    ]
    runs = [load(text) for text in texts]
    assert len({config_hash(run.job, run.topology) for run in runs}) == 3


def test_an_override_takes_it_back() -> None:
    placement = "placement: [{site: a, sequences: 13}]\n"
    assert len(load(placement).topology.sites) == 1
    assert len(load(placement, "placement=[]").topology.sites) == 4


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        (
            "placement: [{site: a, sequences: 5}, {site: e, sequences: 8}]\n",
            "job.yaml:5:45: error: unknown site 'e'",
        ),
        (
            "placement: [{site: a, sequences: 5}, {site: a, sequences: 8}]\n",
            "job.yaml:5:45: error: 'a' is placed twice (first as placement.0)",
        ),
        (
            "placement: [{site: a, sequences: 5}, {site: b, sequences: 7}]\n",
            "the sequences add up to 12, and trainer.global_batch is 13",
        ),
        (
            "placement: [{site: a, sequences: 11}, {site: d, sequences: 2}]\n",
            "want at least 3, a sequence for each rank of 'd'; got 2",
        ),
        (
            "placement: [{site: a, sequences: 5}, {site: c, sequences: 8}]\n",
            "no links in both directions connect 'a' with 'c'",
        ),
        ("placement: [{site: a, sequences: 0}]\n", "want at least 1, got 0"),
        ("placement: [{site: a, sequence: 3}]\n", "unknown key 'sequence'"),
        ("plan: {codecs: [int8, int8]}\n", "'int8' is there twice"),
        ("plan: {sites: some}\n", "want 'auto' or 'all'"),
        ("plan: {max_sync_period: 0}\n", "want at least 1, got 0"),
    ],
)
def test_mistakes_are_told_at_their_place(placement: str, told: str) -> None:
    said = mistakes(placement)
    assert any(told in line for line in said), said
    assert all(line.startswith("job.yaml:") for line in said)


def test_mistakes_of_both_documents_are_told_together() -> None:
    with pytest.raises(ConfigError) as raised:
        load("placement: [{site: a}]\n", topology=("links.0.rtt=1",))
    assert len(raised.value.problems) == 2


def test_a_script_of_ones_own_may_leave_a_rank_without_a_sequence() -> None:
    placement = "placement: [{site: a, sequences: 11}, {site: d, sequences: 2}]\n"
    run = load(placement, "entrypoint=train.py")
    assert len(run.topology.sites) == 2


DESCRIBED = """\
version: 1
name: job
topology: topology.yaml
entrypoint: train.py
workload: {layers: 8, width: 2048, heads: 16, vocabulary: 32000, context: 2048, global_batch: 16}
"""


@pytest.mark.parametrize(
    ("cut", "changes", "where", "message"),
    [
        ("{pipeline: 16}", (), "parallel", "are 16 ranks, and 'a' has 8"),
        ("{pipeline: 8}", ("workload.layers=7",), "parallel.pipeline", "8 stages are more than"),
        ("{tensor: 8}", ("workload.heads=4",), "parallel.tensor", "8 does not divide the 4 heads"),
        ("{data: 8}", ("placement.0.sequences=4",), "sequences", "want at least 8, one for each"),
        (
            "{data: 8, micro_batch: 2}",
            ("workload.micro_batch=1",),
            "parallel.micro_batch",
            "workload.micro_batch is 1: want the same; got 2",
        ),
        (
            "{tensor: 4, data: 2}",
            ("workload.at_most={tensor: 2}",),
            "parallel.tensor",
            "workload.at_most.tensor is 2: want no more; got 4",
        ),
    ],
)
def test_a_written_cut_that_contradicts_the_rest_is_refused(
    cut: str, changes: tuple[str, ...], where: str, message: str
) -> None:
    placed = f"placement: [{{site: a, sequences: 8, parallel: {cut}}}, {{site: b, sequences: 8}}]\n"
    with pytest.raises(ConfigError) as raised:
        load_run(
            DocumentText(f"{DESCRIBED}{placed}", "job.yaml", changes),
            DocumentText(TWO_SITES_YAML, "topology.yaml", ()),
        )
    told = {problem.path: problem.message for problem in raised.value.problems}
    assert message in told[f"placement.0.{where}"]


def test_a_placement_that_leaves_out_a_site_and_a_plan_of_all_contradict_each_other() -> None:
    placed = "plan: {sites: all}\nplacement: [{site: a, sequences: 6}, {site: b, sequences: 7}]\n"
    [told] = mistakes(placed)
    assert "plan.sites is all, and c, d has no place" in told


def test_the_sites_that_a_run_begins_with_come_first_and_all_are_there() -> None:
    run = load("begin_with: [d, c]\n")
    assert [(site.name, site.index) for site in run.topology.sites] == [
        ("c", 0),
        ("d", 1),
        ("a", 2),
        ("b", 3),
    ]
    assert run.topology.links == run.described.links
    run = load("placement: [{site: d, sequences: 8}, {site: a, sequences: 5}]\nbegin_with: [d]\n")
    assert [site.name for site in run.topology.sites] == ["d", "a"]


@pytest.mark.parametrize(
    ("written", "overrides", "expected"),
    [
        ("begin_with: []\n", (), "want at least 1 of them"),
        ("begin_with: [a, f]\n", (), "unknown site 'f'"),
        ("begin_with: [a, a]\n", (), "'a' is named twice"),
        (
            "begin_with: [a, b]\nplacement: [{site: a, sequences: 13}]\n",
            (),
            "unknown site 'b'",
        ),
        ("begin_with: [a, c]\n", (), "no links in both directions connect 'a' with 'c'"),
        ("begin_with: [a, b]\nplan: {}\n", (), "want `begin_with` or `plan`, not both"),
        ("begin_with: [a, b]\nprobe: {}\n", (), "a probe measures the links of all sites"),
        (
            "begin_with: [a, b]\n",
            ("exchange.schedule=off",),
            "no site can be added where `exchange.schedule: off`",
        ),
    ],
)
def test_mistakes_of_the_sites_that_a_run_begins_with(
    written: str, overrides: tuple[str, ...], expected: str
) -> None:
    (found,) = mistakes(written, *overrides)
    assert expected in found


def test_a_run_begins_with_as_many_sites_as_it_goes_on_with() -> None:
    with pytest.raises(ConfigError, match=r"failure\.min_sites is 3: want as many"):
        load("begin_with: [a, b]\n", topology=("failure.min_sites=3",))
