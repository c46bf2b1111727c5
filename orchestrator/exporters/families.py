"""The names of all exported figures: by Prometheus's conventions, and by OpenTelemetry's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a figure may change."""

    GAUGE = "gauge"
    COUNTER = "counter"
    """It only grows; where a site's gateways begin anew, so does what they have counted."""


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of figure: a name, and what its samples are told apart by."""

    prometheus: str
    """Its name there: in base units, a counter ends with `_total`."""
    otel: str
    """Its name there: without the unit."""
    unit: str
    """In UCUM, as OpenTelemetry has units: `s`, `By`, `1`."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Its labels, beside `run`, which every figure has."""


SITE, LINK = ("site",), ("source", "target")

RUN_INFO = Family(
    "isthmus_run_info", "isthmus.run.info", "1", Kind.GAUGE, "1, with the job's name.", ("name",)
)
RUN_STATE = Family(
    "isthmus_run_state",
    "isthmus.run.state",
    "1",
    Kind.GAUGE,
    "1 with the label of the state that the run is in.",
    ("state",),
)
EPOCH = Family(
    "isthmus_epoch",
    "isthmus.epoch",
    "1",
    Kind.GAUGE,
    "Number of the membership epoch: who takes part, and by which trees.",
)
MEMBERS = Family(
    "isthmus_members", "isthmus.members", "{site}", Kind.GAUGE, "Sites that take part."
)
EVENTS = Family(
    "isthmus_events_total",
    "isthmus.events",
    "{event}",
    Kind.COUNTER,
    "Events of a kind: lost, returned, epoch, checkpoint, failure, end.",
    ("event",),
)
STEP = Family("isthmus_step", "isthmus.step", "{step}", Kind.GAUGE, "Last step of any site.")
LOSS = Family(
    "isthmus_loss", "isthmus.loss", "1", Kind.GAUGE, "Mean training loss of the last whole step."
)
HELD_OUT_LOSS = Family(
    "isthmus_held_out_loss", "isthmus.held_out_loss", "1", Kind.GAUGE, "Of the last evaluation."
)
TOKENS_PER_S = Family(
    "isthmus_tokens_per_second",
    "isthmus.tokens.rate",
    "{token}/s",
    Kind.GAUGE,
    "Tokens a second in the last step of each site that takes part, all together.",
)
CHECKPOINT_STEP = Family(
    "isthmus_checkpoint_step",
    "isthmus.checkpoint.step",
    "{step}",
    Kind.GAUGE,
    "Step of the newest checkpoint.",
)

CERTIFICATE_ENDS = Family(
    "isthmus_certificate_ends_timestamp_seconds",
    "isthmus.certificate.ends",
    "s",
    Kind.GAUGE,
    "When a party's certificate ends, as Unix time; its file's name, as eu.agent.",
    ("certificate",),
)

SITE_STATE = Family(
    "isthmus_site_state",
    "isthmus.site.state",
    "1",
    Kind.GAUGE,
    "1 with the label of the state that the site is in.",
    ("site", "state"),
)
STEPS = Family(
    "isthmus_steps_total",
    "isthmus.steps",
    "{step}",
    Kind.COUNTER,
    "Steps that the site has taken.",
    SITE,
)
TOKENS = Family(
    "isthmus_tokens_total",
    "isthmus.tokens",
    "{token}",
    Kind.COUNTER,
    "Tokens that the site has trained on.",
    SITE,
)
SITE_LOSS = Family(
    "isthmus_site_loss",
    "isthmus.site.loss",
    "1",
    Kind.GAUGE,
    "Mean training loss of the site's own tokens in its last step.",
    SITE,
)
STEP_TIME = Family(
    "isthmus_step_seconds",
    "isthmus.step.duration",
    "s",
    Kind.GAUGE,
    "Wall time of the site's last step.",
    SITE,
)
PART_TIME = Family(
    "isthmus_step_part_seconds",
    "isthmus.step.part.duration",
    "s",
    Kind.GAUGE,
    "Parts of the site's last step, which add up to it.",
    ("site", "part"),
)
PART_TIME_TOTAL = Family(
    "isthmus_step_parts_seconds_total",
    "isthmus.step.parts.time",
    "s",
    Kind.COUNTER,
    "Time in each part of the site's steps, of all steps together.",
    ("site", "part"),
)
HIDDEN_TIME = Family(
    "isthmus_hidden_wan_seconds",
    "isthmus.step.hidden_wan.duration",
    "s",
    Kind.GAUGE,
    "Time in which gradients crossed the WAN during backward; no part of the step's time.",
    SITE,
)

SENT_BYTES = Family(
    "isthmus_link_sent_bytes_total",
    "isthmus.link.sent",
    "By",
    Kind.COUNTER,
    "Bytes that crossed the link.",
    LINK,
)
RAW_BYTES = Family(
    "isthmus_link_raw_bytes_total",
    "isthmus.link.raw",
    "By",
    Kind.COUNTER,
    "float32 bytes of what crossed the link, before the codec.",
    LINK,
)
DESCRIBED_RATE = Family(
    "isthmus_link_described_bytes_per_second",
    "isthmus.link.described_rate",
    "By/s",
    Kind.GAUGE,
    "What the topology gives the run of the link.",
    LINK,
)
MEASURED_RATE = Family(
    "isthmus_link_measured_bytes_per_second",
    "isthmus.link.measured_rate",
    "By/s",
    Kind.GAUGE,
    "What crossed while the link, and not an idle sender, was the limit.",
    LINK,
)
UTILISATION = Family(
    "isthmus_link_utilisation_ratio",
    "isthmus.link.utilisation",
    "1",
    Kind.GAUGE,
    "Bytes of the last seconds over what the topology gives the run of the link in that time.",
    LINK,
)
RTT = Family(
    "isthmus_link_rtt_seconds",
    "isthmus.link.rtt",
    "s",
    Kind.GAUGE,
    "Shortest time from a frame's sending to its acknowledgement.",
    LINK,
)
DESCRIBED_RTT = Family(
    "isthmus_link_described_rtt_seconds",
    "isthmus.link.described_rtt",
    "s",
    Kind.GAUGE,
    "Round trip that the topology gives.",
    LINK,
)
EGRESS = Family(
    "isthmus_link_egress_dollars_total",
    "isthmus.link.egress",
    "{USD}",
    Kind.COUNTER,
    "Price of the bytes that crossed the link, where the topology has one.",
    LINK,
)

FAMILIES = tuple(each for each in list(globals().values()) if isinstance(each, Family))
"""All of them, in the order of this file."""
