"""--set: through the same models, reported as what was typed."""

import pytest

from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.spec.errors import ConfigError
from tests.topology.documents import JOB, TOPOLOGY, told


def test_overrides_change_values_in_order_and_make_what_is_not_there() -> None:
    topology = load_topology(
        TOPOLOGY,
        "t.yaml",
        [
            "links.0.rtt=1s",
            "links.0.rtt=120ms",
            "failure.start_within=5min",
            "sites.2.location={lat: 40, lon: -83}",
            "sites.1.wan.address=127.0.0.9",
            "links.0.measured.bandwidth=1Gbit/s",
            "emulate=false",
        ],
    )
    link = topology.link("virginia", "oregon")
    assert link is not None
    assert (link.rtt_s, link.bytes_per_s) == (0.12, 125e6)
    assert topology.failure.start_within_s == 300
    assert topology.sites[2].location is not None
    assert topology.sites[1].address == "127.0.0.9"
    assert not topology.emulate


def test_a_name_that_an_override_made_a_second_one_has_no_line() -> None:
    with pytest.raises(ConfigError, match=r"duplicate site 'virginia' \(first in an override\)"):
        load_topology(TOPOLOGY, "t.yaml", ["sites.0.name=virginia"])


def test_an_override_does_not_reach_through_an_alias() -> None:
    text = TOPOLOGY.replace("fabric: {", "fabric: &f {").replace(
        "like: oregon,", "like: oregon, fabric: *f,"
    )
    topology = load_topology(text, "t.yaml", ["sites.1.fabric.latency=9us"])
    latencies = [site.fabric.latency_s for site in topology.sites if site.fabric]
    assert latencies == [8e-6, 9e-6, 9e-6]


WRONG = [
    ("links.0.rtt=120", "links.0.rtt", "want a duration in ns, us, ms, s, min, h, as 80ms; got 120 without a unit"),
    ("links.0.rttt=1ms", "links.0.rttt", "unknown key 'rttt' (did you mean 'rtt'?)"),
    ("linkz.0.rtt=1ms", "linkz", "unknown key 'linkz' (did you mean 'links'?)"),
    ("links.7.rtt=1ms", "links.7", "links has 2 items: want a position from 0, got '7'"),
    ("links.-1.rtt=1ms", "links.-1", "links has 2 items: want a position from 0, got '-1'"),
    ("name.x=1", "name.x", "name is a single value: it has no 'x'"),
    ("links.0.rtt", "", "want path=value, as --set links.0.rtt=120ms"),
    ("=3", "", "want path=value, as --set links.0.rtt=120ms"),
    ("links..rtt=3", "", "want path=value, as --set links.0.rtt=120ms"),
    ("name=", "name", "no value: want path=value"),
    ("name=[", "name", "expected the node content, but found '<stream end>'"),
    ("name=010", "name", "010 has a leading zero: write the number without it, or quote it"),
    ("name=!!x y", "name", "tags (!...) are not supported: write the plain value"),
    ("coordinator.site=z", "coordinator.site", "unknown site 'z'"),
    ("failure.foo.bar=3", "failure.foo", "unknown key 'foo'"),
    ("failure.detect_within=1ms", "failure.detect_within", "want at least 0.5 s, got 0.001 s"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "path", "message"), WRONG)
def test_a_wrong_override_is_told_as_it_was_typed(override: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_topology(TOPOLOGY, "t.yaml", [override])
    (problem,) = raised.value.problems
    assert problem.source == f"--set {override.partition('=')[0]}"
    assert (problem.line, problem.column) == (0, 0)
    assert (problem.path, problem.message) == (path, message)
    assert str(problem).startswith(f"{problem.source}: error: {message}")


def test_mistakes_in_overrides_and_in_the_file_are_told_together() -> None:
    text = JOB.replace("steps: 20", "steps: 0")
    assert told("job", text, "trainer.seed=x", "exchange.chunk=1B") == [
        "0:0 want 64KiB to 16MiB, got '1B' [exchange.chunk]",
        "0:0 want a whole number, got 'x' [trainer.seed]",
        "8:10 want at least 1, got 0 [trainer.steps]",
    ]


def test_an_override_of_a_job_may_hold_equals_signs() -> None:
    job = load_job(JOB, "job.yaml", ["entrypoint=train.py", "arguments=[--lr=0.1, '3']"])
    assert job.arguments == ("--lr=0.1", "3")
