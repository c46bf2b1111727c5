"""What a machine answers the doctor."""

from __future__ import annotations

from isthmus.orchestrator.doctor.examiner import NoAnswerError, result_of
from isthmus.orchestrator.doctor.machine_checks import Machine, machine_findings
from isthmus.orchestrator.doctor.path_checks import route_findings, tcp_findings
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.json_lines import line_of
from isthmus.topology.spec.machine_facts import Answer, Facts
from tests.fakes.machines import good_facts, topology
from tests.fuzz.line_targets import json_bytes
from tests.fuzz.target import Target

_WORLD = topology()


def _examine(data: bytes) -> object:
    """Read the facts, and check them: whatever can be read can be judged."""
    machine = Machine(name="a", sites=_WORLD.sites, facts=result_of(data, Facts))
    checked = machine_findings(machine, _WORLD), route_findings(machine, _WORLD)
    return *checked, tcp_findings({"a": machine, "b": machine}, _WORLD, None)


def _most_bytes(data: bytes) -> int:
    """Return what the text may take, and the findings besides."""
    return (64 << 10) + json_bytes(data)


def _samples() -> list[bytes]:
    facts = to_json(good_facts())
    bad = {
        **facts,
        "refused": {"127.0.0.2": "something listens there already"},
        "mtus_bytes": {"127.0.0.3": 576},
        "limits": {"open_files": 10, "processes": 10, "locked_bytes": 10},
        "tcp": {"receive_max_bytes": 4096, "send_max_bytes": 4096, "congestion": "cubic"},
        "accelerators": {"names": ["gpu"], "nccl": False},
    }
    return [line_of(Answer(result=each)) for each in (facts, bad, {**facts, "later": [1]})]


FACTS_TARGETS = (
    Target(
        name="machine-facts",
        decode=_examine,
        refusals=(NoAnswerError,),
        samples=_samples,
        most_bytes=_most_bytes,
    ),
)
