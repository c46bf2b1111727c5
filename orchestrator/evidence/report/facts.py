"""The figures of one run: what the page, Markdown and JSON all show. None is what is not known."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.evidence.report.timelines import StepTimeline
from protos import metrics

PARTS = {
    metrics.COMPUTE_S: "compute",
    metrics.INTRA_S: "inside site",
    metrics.EXPOSED_INTER_S: "WAN, exposed",
    metrics.WAIT_S: "waiting for others",
}
"""What a step's time is split into, and what people call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """One site: where it is, and the mean over its steps."""

    site: str
    lat: float | None
    lon: float | None
    num_ranks: int | None
    accelerator: str | None
    num_steps: int
    tokens_per_s: float | None
    step_s: float | None
    parts_s: dict[str, float]
    """By the keys of PARTS; they add up to step_s."""
    hidden_inter_s: float | None
    encode_s: float | None
    decode_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """One directed link, over the run."""

    source: str
    target: str
    configured_bytes_per_s: float | None
    configured_rtt_s: float | None
    throughput_bytes_per_s: float | None
    """While it was busy."""
    use: float | None
    """Throughput over configured."""
    busy: float | None
    """Share of the run with a frame on the way."""
    sent_bytes: float | None
    ratio: float | None
    """float32 bytes over sent bytes."""
    rtt_s: float | None
    egress_usd: float | None
    lost_packets: float | None
    """By the emulator, as configured; like the next, None where the WAN is real."""
    dropped_packets: float | None
    """By the emulator, because its queue was full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFacts:
    """Something that was done to the run, or that it died of."""

    wall_s: float
    active_s: float | None
    """Since the run was active."""
    step: int
    """The last one that was done by then."""
    what: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """How gradients cross, and why so."""

    reduction: str
    edges: tuple[tuple[str, str], ...]
    """Pairs of sites that exchange bytes."""
    codec: str
    codecs: tuple[str, ...]
    """Of each of the reduction's trees; of a gather, one."""
    chunk_bytes: int
    bucket_bytes: int
    channels_per_link: int | None
    """None: as many as the link takes."""
    schedule: str
    compute: str
    verify_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run."""

    run_id: str
    name: str
    state: str
    reason_code: str
    reason: str
    log_path: str
    folder: str
    created_wall_s: float
    active_s: float | None
    steps: int
    tokens: float
    tokens_per_s: float | None
    step_s: float | None
    exposed_share: float | None
    """Of all sites' step time."""
    first_loss: float | None
    last_loss: float | None
    held_out_loss: float | None
    unigram_entropy: float | None
    sent_bytes: float | None
    ratio: float | None
    egress_usd: float | None
    verified_steps: int | None
    sites: tuple[SiteFacts, ...]
    links: tuple[LinkFacts, ...]
    losses: tuple[tuple[int, float], ...]
    evaluations: tuple[tuple[int, float], ...]
    faults: tuple[FaultFacts, ...]
    plan: PlanFacts | None
    emulator: str
    """`relay` or `netns`; empty: nothing was emulated."""
    emulator_note: str
    """What was lost by falling back from another one."""
    num_timelines: int
    """Steps whose buckets were kept."""
    timelines: tuple[StepTimeline, ...]
    """At most MAX_STEPS of them."""
    gaps: tuple[str, ...]
