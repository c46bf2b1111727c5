"""Link traces: read, every mistake at its line, and made the fault script that plays them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.topology.faults.link_trace import Sample, fault_script, read_trace
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import Change, expand
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Topology
from tests.fakes.plannable import a_world

WORLD = a_world([1e9, 1e9], [(0, 1, 1e7, 0.05)])
CSV = """\
time_s,source,target,bytes_per_s,rtt_s,loss
0,s0,s1,5e6,0.08,0.001
30,s0,s1,,0.2,
10,s1,s0,2.5e6,,

"""


def played(text: str, topology: Topology = WORLD) -> list[tuple[float, Change]]:
    script = load_faults(fault_script(read_trace(text, "t", topology), "t"), "s", topology)
    found = []
    for each in expand(script):
        assert isinstance(each.change, Change)
        found.append((each.at_s, each.change))
    return found


def test_a_trace_is_played_in_order_of_time() -> None:
    first, second, third = played(CSV)
    assert first[0] == 0.0
    assert (first[1].source, first[1].target) == ("s0", "s1")
    assert first[1].figures() == {
        "bytes_per_s": 5e6, "delay_s": 0.04, "jitter_s": 0.0, "loss": 0.001
    }  # fmt: skip
    assert (second[0], second[1].source, second[1].bytes_per_s) == (10.0, "s1", 2.5e6)
    assert third[0] == 30.0
    assert third[1].bytes_per_s == 5e6, "as it was"
    assert third[1].delay_s == pytest.approx(0.1)


def test_json_lines_say_the_same() -> None:
    rows = [
        {"time_s": 0, "source": "s0", "target": "s1", "bytes_per_s": 5e6, "rtt_s": 0.08,
         "loss": 0.001},
        {"time_s": 30.0, "source": "s0", "target": "s1", "rtt_s": 0.2, "loss": None},
        {"time_s": 10, "source": "s1", "target": "s0", "bytes_per_s": 2.5e6},
    ]  # fmt: skip
    assert played("\n".join(map(json.dumps, rows))) == played(CSV)


def test_what_hardly_changes_is_no_change() -> None:
    rows = "".join(f"{at},s0,s1,{5e6 * (1 + 0.01 * (at % 3))}\n" for at in range(3000))
    assert len(played(f"time_s,source,target,bytes_per_s\n{rows}")) == 1


def test_too_many_changes_are_refused() -> None:
    rows = "".join(f"{at},s0,s1,{5e6 * (1 + at % 2)}\n" for at in range(1001))
    samples = read_trace(f"time_s,source,target,bytes_per_s\n{rows}", "t.csv", WORLD)
    with pytest.raises(ConfigError, match="links change 1001 times"):
        fault_script(samples, "t.csv")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("time_s,source,target,rate\n0,s0,s1,5", 1, "unknown column 'rate'"),
        ("time_s,source,bytes_per_s\n0,s0,5", 1, "a column is missing: target"),
        ("time_s,source,target,bytes_per_s\n0,s0,s1", 2, "want 4 values, got 3"),
        ("time_s,source,target,bytes_per_s\n0,s0,s1,10Mbit/s", 2, "bytes a second, more than 0"),
        ("time_s,source,target,bytes_per_s\n0,s0,s1,0", 2, "bytes a second, more than 0"),
        ("time_s,source,target,loss\n0,s0,s1,1", 2, "a share of packets, 0 to less than 1"),
        ("time_s,source,target,rtt_s\n-1,s0,s1,1", 2, "seconds, 0 or more"),
        ("time_s,source,target,rtt_s\n\n1,s0,s1,", 3, "says nothing of the link"),
        ("time_s,source,target,rtt_s\n1,s0,s2,1", 2, "no link from s0 to s2; it has: s0 to s1"),
        ('{"time_s": 1, "source": "s0", "target": "s1", "rtt": 1}', 1, "did you mean 'rtt_s'"),
        ('{"time_s": 1, "source": "s0", "rtt_s": 1}', 1, "want target"),
        ('{"time_s": 1, "source": "s0", "target": "s1", "rtt_s": true}', 1, "got True"),
        ('{"time_s": 1}\n{', 1, "want source"),
        ("{\n{}", 1, "want a JSON object"),
        ("", 0, "holds no sample"),
        ("time_s,source,target,rtt_s\n", 0, "holds no sample"),
    ],
)
def test_mistakes_are_named_at_their_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(text, "t.csv", WORLD)
    assert caught.value.problems[0].line == line
    assert caught.value.problems[0].source == "t.csv"
    assert words in str(caught.value)


def metric(at_s: float, kind: str = "link", gateway: str = "0", **values: float) -> str:
    labels = {"source": "s0", "target": "s1", "gateway": gateway}
    fields: dict[str, Any] = {"kind": kind, "site": "s0", "labels": labels, "values": values}
    return json.dumps({**fields, "wall_s": 1e9 + at_s, "step": 1, "rank": -1})


def test_a_runs_metrics_are_a_trace() -> None:
    """Bandwidth is what crossed while the link was the limit, over that time."""
    lines = [
        metric(0.0, limited_bytes=0.0, limited_s=0.0, idle_rtt_s=0.06),
        metric(1.0, "step", step_s=1.0),
        metric(2.0, limited_bytes=8e6, limited_s=2.0, idle_rtt_s=0.06),
        metric(6.0, limited_bytes=20e6, limited_s=4.0, idle_rtt_s=0.06),
        metric(12.0, limited_bytes=20e6, limited_s=4.0, idle_rtt_s=0.09),
        metric(18.0, limited_bytes=24e6, limited_s=5.0, idle_rtt_s=0.09),
        metric(24.0, limited_bytes=1e6, limited_s=1.0),  # a gateway that was started again
        '{"kind": "li',
    ]
    samples = read_trace("\n".join(lines), "metrics.jsonl", WORLD)
    assert [(each.time_s, each.bytes_per_s, each.rtt_s) for each in samples] == [
        (0.0, None, 0.06),
        (6.0, 5e6, None),
        (12.0, None, 0.09),
        (18.0, 4e6, None),
        (24.0, 1e6, None),
    ]


def test_metrics_without_a_link_of_the_topology_say_so(tmp_path: Path) -> None:
    other = metric(0.0, limited_bytes=1e6, limited_s=1.0).replace("s0", "elsewhere")
    with pytest.raises(ConfigError, match="record a run that fills its links"):
        read_trace(other, "metrics.jsonl", WORLD)


def test_names_that_yaml_would_take_for_something_else() -> None:
    script = fault_script(
        [Sample(time_s=1.0, source="on", target="1e3", bytes_per_s=5e6, loss=1e-5)], "t"
    )
    assert 'link: ["on", "1e3"]' in script
    assert "loss: 0.001000%" in script
