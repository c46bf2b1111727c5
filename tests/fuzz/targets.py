"""Every decoder that reads what another process, machine or person wrote, by name."""

from __future__ import annotations

from tests.fuzz.document_targets import DOCUMENT_TARGETS
from tests.fuzz.line_targets import LINE_TARGETS
from tests.fuzz.wire_targets import WIRE_TARGETS

TARGETS = {each.name: each for each in (*WIRE_TARGETS, *LINE_TARGETS, *DOCUMENT_TARGETS)}
