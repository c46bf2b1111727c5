"""Every decoder that reads what another process, machine or person wrote, by name."""

from __future__ import annotations

from tests.fuzz.document_targets import DOCUMENT_TARGETS
from tests.fuzz.facts_targets import FACTS_TARGETS
from tests.fuzz.http2_targets import HTTP2_TARGETS
from tests.fuzz.line_targets import LINE_TARGETS
from tests.fuzz.local_targets import LOCAL_TARGETS
from tests.fuzz.message_targets import MESSAGE_TARGETS
from tests.fuzz.node_targets import NODE_TARGETS
from tests.fuzz.plan_targets import PLAN_TARGETS
from tests.fuzz.probe_targets import PROBE_TARGETS
from tests.fuzz.wire_targets import WIRE_TARGETS

_ALL = (
    *WIRE_TARGETS,
    *HTTP2_TARGETS,
    *LINE_TARGETS,
    *LOCAL_TARGETS,
    *NODE_TARGETS,
    *DOCUMENT_TARGETS,
    *PLAN_TARGETS,
    *PROBE_TARGETS,
    *FACTS_TARGETS,
    *MESSAGE_TARGETS,
)
TARGETS = {each.name: each for each in _ALL}
