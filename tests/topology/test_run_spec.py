"""A run's spec is read as it was written, and another build's is refused."""

from __future__ import annotations

import json

import pytest

from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec, spec_hash
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


def test_what_another_build_wrote_is_refused_by_the_fields_name() -> None:
    fields = json.loads(spec().to_bytes())
    fields["job"]["exchange"]["newer"] = {"x": 1}
    with pytest.raises(ConfigError, match=r"job\.exchange\.newer: unknown; .* another build"):
        RunSpec.from_bytes(json.dumps(fields).encode())


def test_trees_whose_results_go_another_way_are_read_as_they_were_written() -> None:
    turned = Tree(0, {1: 0, 2: 1}, down={2: 0, 1: 2})
    plans = [CodedPlan(ReductionPlan(3, (tree,), ""), ("fp32",)) for tree in (star(3, 0), turned)]
    assert [CodedPlan.from_bytes(plan.to_bytes()) for plan in plans] == plans
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
    whole = spec("begin_with: [a, b, c]\n")
    assert (whole.first, whole.first_sites) == (None, whole.site_names)
