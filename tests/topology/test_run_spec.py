"""A run's spec is read as it was written, also by other builds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

import pytest

from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import REQUIRED
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec, _required, spec_hash
from tests.fakes.described import described_job
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import JOB, topology

WRITTEN = """
entrypoint: train.py
arguments: [--fast]
exchange: {codec: int8, codecs: [{between: [a, b], codec: bf16}], exact: ["*.norm"]}
reduction: {trees: [{root: a, parents: {b: a, c: a}, weight: 2}, {root: b, parents: {a: b, c: b}}]}
placement: [{site: a, sequences: 16, parallel: {data: 2}}, {site: b, sequences: 16}, {site: c, sequences: 16}]
trainer: {data: {files: ["text/*.txt"]}}
plan: {}
"""


def spec(written: str = WRITTEN) -> RunSpec:
    return spec_of(load_job(JOB + written, "job.yaml"), topology(3), Replan(gain=0.1))


def with_fields(written: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(written), **fields}).encode()


def test_a_spec_is_read_as_it_was_written() -> None:
    for one in (spec(), spec("probe: {}\n"), spec_of(described_job(), topology(2))):
        written = one.to_bytes()
        read = RunSpec.from_bytes(written)
        assert read == one
        assert read.reduction.plan.turns == one.reduction.plan.turns
        assert read.topology.link("a", "b") == one.topology.link("a", "b")
        assert read.to_bytes() == written
        assert spec_hash(written) == spec_hash(read.to_bytes())


def test_what_a_run_comes_to_is_decided_with_absolute_paths() -> None:
    one = spec()
    assert one.job.entrypoint == "/jobs/train.py"
    assert one.job.trainer.data.files == ("/jobs/text/*.txt",)
    assert one.site_names == ("a", "b", "c")
    assert one.reduction.codecs == ("int8", "int8")
    assert [tree.weight for tree in one.reduction.plan.trees] == [2, 1]
    assert one.timeouts.lease_s == one.topology.failure.detect_within_s
    assert 0 < one.chunk_bytes <= one.job.exchange.chunk_bytes


def test_a_reader_skips_what_it_does_not_know_and_takes_defaults_for_what_is_missing() -> None:
    one = spec()
    fields = json.loads(one.to_bytes())
    fields["job"]["exchange"]["newer"] = {"x": 1}
    fields["topology"]["links"][1]["newer"] = 2
    del fields["replan"]
    del fields["job"]["trainer"]["model"]["heads"]
    del fields["required"]
    read = RunSpec.from_bytes(json.dumps(fields).encode())
    assert read == dataclasses.replace(one, replan=None)


def test_a_site_must_know_of_several_gateways_a_node_only_where_there_are_any() -> None:
    one = spec()
    gathers = ["reduction.plan.gathered_bytes"]
    assert json.loads(one.to_bytes())["required"] == gathers
    sites = tuple(
        dataclasses.replace(site, accelerators_per_node=4, gateways_per_node=2)
        for site in one.topology.sites
    )
    several = dataclasses.replace(one, topology=dataclasses.replace(one.topology, sites=sites))
    assert json.loads(several.to_bytes())["required"] == [
        *gathers,
        "topology.sites.gateways_per_node",
    ]
    assert RunSpec.from_bytes(several.to_bytes()) == several


def test_a_site_must_know_of_a_decay_only_where_there_is_one() -> None:
    plain = json.loads(spec().to_bytes())
    assert "error_feedback_decay" not in plain["job"]["exchange"]
    one = spec("exchange: {codec: topk2, error_feedback_decay: 0.95}\n")
    assert "job.exchange.error_feedback_decay" in json.loads(one.to_bytes())["required"]
    assert RunSpec.from_bytes(one.to_bytes()).job.exchange.error_feedback_decay == 0.95


@pytest.mark.parametrize("required", ["job.exchange.newer.x", "topology.links.newer"])
def test_a_reader_refuses_what_it_must_know_by_name(required: str) -> None:
    fields = json.loads(spec().to_bytes())
    fields["job"]["exchange"]["newer"] = {"x": 1}
    fields["topology"]["links"][1]["newer"] = 2
    written = json.dumps({**fields, "required": [required, "job.name"]}).encode()
    with pytest.raises(ConfigError, match=rf"`{required}`.* update isthmus at site b"):
        RunSpec.from_bytes(written, "site b")


@dataclass(frozen=True)
class _Newer:
    plain: int = 1
    wanted: int = field(default=0, metadata=REQUIRED)


@dataclass(frozen=True)
class _Whole:
    inner: tuple[_Newer, ...] = ()
    wanted: str = field(default="", metadata=REQUIRED)


def test_a_required_field_is_listed_where_it_is_in_use() -> None:
    assert list(_required(_Whole((_Newer(plain=2),)))) == []
    whole = _Whole((_Newer(), _Newer(wanted=3)), wanted="x")
    assert list(_required(whole)) == ["inner.wanted", "wanted"]


def test_only_sites_that_know_them_take_trees_whose_results_go_another_way() -> None:
    turned = Tree(0, {1: 0, 2: 1}, down={2: 0, 1: 2})
    plans = [CodedPlan(ReductionPlan(3, (each,), ""), ("fp32",)) for each in (star(3, 0), turned)]
    assert [CodedPlan.from_bytes(each.to_bytes()) for each in plans] == plans
    assert [b"down" in each.to_bytes() for each in plans] == [False, True]
    one = spec()
    assert [list(_required(dataclasses.replace(one, reduction=each))) for each in plans] == [
        [],
        ["reduction.plan.trees.down"],
    ]
    same_way = Tree(0, {1: 0, 2: 1}, down={2: 1, 1: 0})
    assert same_way == Tree(0, {1: 0, 2: 1})


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no JSON object"),
        (b"{}", "job is missing"),
        (with_fields(spec().to_bytes(), chunk_bytes="1"), "chunk_bytes: want int"),
        (with_fields(spec().to_bytes(), required=3), "required: want a list"),
        (with_fields(spec().to_bytes(), topology=[]), "topology: want an object"),
    ],
)
def test_what_is_no_spec_is_refused(written: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RunSpec.from_bytes(written)


def test_a_run_that_begins_with_some_sites_has_a_reduction_of_these_and_of_all() -> None:
    one = spec("reduction: {tree: star}\nbegin_with: [c, b]\n")
    assert (one.site_names, one.first_sites) == (("b", "c", "a"), ("b", "c"))
    assert one.reduction.plan.members == (0, 1, 2)
    assert one.first_reduction.plan.members == (0, 1)
    assert RunSpec.from_bytes(one.to_bytes()) == one
    assert {"job.begin_with", "first"} <= {*_required(one)}
    whole = spec("begin_with: [a, b, c]\n")
    assert (whole.first, whole.first_sites) == (None, whole.site_names)
    assert "first" not in {*_required(whole)}
