"""A request becomes a decided run: a plan's decisions are in it, and evidence goes along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.orchestrator.coordinator.submission import Submission, decided
from isthmus.protos.blobs import Blobs
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import ConfigMismatchError, RemoteProtocolError
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.hashing import topology_hash
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.run_spec import RunSpec
from tests.fakes.worlds import JOB, topology, topology_text

DECISIONS = {
    "placement": [{"site": "a", "sequences": 20}, {"site": "c", "sequences": 28}],
    "reduction": {"tree": "gather"},
    "micro_batch": 4,
    "exchange": {"codec": "int8"},
}


def submission(
    section: str = "", overrides: tuple[str, ...] = (), decisions: object = None, own: str = ""
) -> Submission:
    request = control_pb2.SubmitRequest(
        run_id="run-1",
        job=control_pb2.Document(source="/jobs/job.yaml", text=JOB + section, overrides=overrides),
        topology=control_pb2.Document(source="topology.yaml", text=topology_text(3)),
        decisions="" if decisions is None else json.dumps(decisions),
    )
    return decided(request, own or topology_hash(topology(3)), {}, Blobs(Path("/nowhere")))


def test_a_plans_decisions_are_in_the_spec_and_among_the_evidence() -> None:
    one = submission("plan: {}\n", ("trainer.steps=7",), DECISIONS)
    spec = one.spec
    assert RunSpec.from_bytes(one.written_spec) == spec
    assert spec.site_names == ("a", "c")
    assert (spec.job.trainer.steps, spec.job.trainer.micro_batch) == (7, 4)
    assert spec.reduction.plan.is_gather
    assert spec.reduction.codecs == ("int8",)
    assert [site.name for site in one.described.sites] == ["a", "b", "c"]
    kept = one.to_json(Path("/run"))
    assert kept["job_overrides"][0] == "trainer.steps=7"
    assert 'reduction={"tree": "gather"}' in kept["job_overrides"]
    assert kept["sites"] == ["a", "c"]
    assert kept["num_steps"] == 7
    assert kept["codec"] == "int8"
    assert all(each["egress_usd_per_byte"] == 0.0 for each in kept["links"])


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("", None),
        ("plan: {}\n", Replan()),
        ("plan: {replan: off}\n", None),
        ("plan: {replan: {lasting: 2s, gain: 10%}}\n", Replan(lasting_s=2.0, gain=0.1)),
        ("plan: {}\nexchange: {schedule: off}\n", None),
        ("plan: {}\nreduction: {tree: ring}\n", None),
    ],
)
def test_which_jobs_are_planned_again(section: str, expected: Replan | None) -> None:
    assert submission(section).spec.replan == expected


def test_a_plans_reduction_is_planned_again_and_a_users_is_not() -> None:
    gather = {"reduction": {"tree": "gather"}, "exchange": {}}
    assert submission("plan: {}\n", decisions=gather).spec.replan == Replan()
    asked = ("reduction.tree=ring",)
    assert submission("plan: {}\n", asked, gather).spec.replan is None
    assert submission("plan: {}\n", ("reduction={tree: gather}",)).spec.replan is None


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigMismatchError, match="not the topology"):
        submission(own="0" * 64)
    with pytest.raises(ConfigError, match="hub"):
        submission("reduction: {tree: star, hub: z}\n")
    with pytest.raises(ConfigError, match="placement"):
        submission("plan: {}\n", decisions={**DECISIONS, "placement": 3})
    for wrong in ("text", ["x"], {"exchange": 3}):
        with pytest.raises(RemoteProtocolError, match="decisions"):
            submission("plan: {}\n", decisions=wrong)
