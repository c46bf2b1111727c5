"""What a measurement of links leaves.

A peer's counts, a run's records, figures in a topology's text.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from isthmus.orchestrator.evidence.link_probe import link_figures, read_directions
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.orchestrator.run_folder.run_files import METRICS, MetricsError, read_metrics
from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.exchange.v1 import probe_pb2
from isthmus.sites.gateway.probing.prober import rate_between
from isthmus.topology.documents.editing import with_measured
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.measured_links import drifts
from isthmus.topology.text.yaml_document import read_document
from tests.fakes.recorded_runs import metric
from tests.fuzz.document_targets import yaml_bytes
from tests.fuzz.line_targets import file_with, json_bytes, line
from tests.fuzz.target import KIB, MIB, Target
from tests.topology.documents import TOPOLOGY, changed

_WORLD = load_topology(TOPOLOGY, "t.yaml")
_PAIRS = [(link.source, link.target) for link in _WORLD.links]
_FIGURES = {"bandwidth": "87Mbit/s", "rtt": "31ms", "at": "2026-05-01T12:00:00Z"}

_FLOW = changed(
    TOPOLOGY,
    "rtt: 62ms",
    "rtt: 62ms, measured: {bandwidth: 87Mbit/s, loss: 0.1%} # by hand\n   ",
)
_BLOCK = """\
version: 1
name: blocks
sites:
- {name: a, nodes: 1, accelerators_per_node: 1, accelerator: cpu}
- {name: b, like: a}
links:
- between: [a, b] # the long one
  bandwidth: 1Gbit/s
  rtt: 20ms
  measured:
    bandwidth: 400Mbit/s   # half of it
    rtt: 21ms
    at: 2026-01-01T00:00:00Z
# the end
"""
_WINDOWS = _BLOCK.replace("\n", "\r\n")


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


# ---------------------------------------------------------------- between gateways


def _answer_samples() -> list[bytes]:
    answers = [
        probe_pb2.TurnResponse(received_bytes=count, now_s=at_s)
        for count, at_s in ((0, 100.0), (1 << 40, 102.5))
    ]
    first, last = (each.SerializeToString() for each in answers)
    return [bytes([len(first)]) + first + last]


def _read_answers(data: bytes) -> None:
    """Take two answers of a turn, the first of so many bytes as the first byte says."""
    size = data[0] if data else 0
    before, after = (
        probe_pb2.TurnResponse.FromString(part) for part in (data[1 : 1 + size], data[1 + size :])
    )
    rate = rate_between((before.received_bytes, after.received_bytes), (before.now_s, after.now_s))
    assert rate >= 0


# ---------------------------------------------------------------- what a run leaves


def _record_samples() -> list[bytes]:
    values = {"rtt_s_p50": 0.02, "rtt_s_p99": 0.03, "jitter_s": 0.001}
    values |= {"bytes_per_s_1": 1e6, "bytes_per_s_16": 4e6, "segments": 9e4, "lost_segments": 9.0}
    records = [
        line(metric(source, "probe", -1, 10.0, values, source=source, target=target))
        for source, target in _PAIRS
    ]
    return [b"".join(records)]


def _read_records(data: bytes) -> None:
    """Read a probing run's records, and write their figures into the topology."""
    with file_with(data, METRICS) as path:
        measured = read_directions(read_metrics(path), _WORLD, _PAIRS, "netns")
    document = read_document(TOPOLOGY, "t.yaml")
    figures = link_figures(document, _WORLD, measured, at=_FIGURES["at"], is_emulated=True)
    text = with_measured(TOPOLOGY, "t.yaml", figures)
    assert load_topology(text, "t.yaml").sites == _WORLD.sites


def _edit(data: bytes) -> None:
    """Write figures into every link of a topology that is valid; what they are is read again."""
    text = _text(data)
    before = load_topology(text, "t.yaml")
    count = len(read_document(text, "t.yaml").sequence("links"))
    after = load_topology(
        with_measured(text, "t.yaml", dict.fromkeys(range(count), _FIGURES)), "t.yaml"
    )
    assert after.sites == before.sites
    assert all(link.measured_at == _FIGURES["at"] for link in after.links)


def _warn(data: bytes) -> None:
    for drift in drifts(load_topology(_text(data), "t.yaml")):
        assert str(drift)


PROBE_TARGETS = (
    Target(
        name="probe-answer",
        decode=_read_answers,
        refusals=(RemoteProtocolError, DecodeError),
        samples=_answer_samples,
        most_bytes=lambda data: 16 * KIB + 4 * len(data),
    ),
    Target(
        name="probe-records",
        decode=_read_records,
        refusals=(MeasurementError, MetricsError, ConfigError),
        samples=_record_samples,
        most_bytes=lambda data: 4 * MIB + json_bytes(data),
        mutations=60,
    ),
    Target(
        name="measured-forms",
        decode=_edit,
        refusals=(ConfigError,),
        samples=lambda: [each.encode() for each in (_FLOW, _BLOCK, _WINDOWS)],
        most_bytes=yaml_bytes,
        mutations=60,
    ),
    Target(
        name="drift",
        decode=_warn,
        refusals=(ConfigError,),
        samples=lambda: [each.encode() for each in (_FLOW, _BLOCK)],
        most_bytes=yaml_bytes,
        mutations=60,
    ),
)
