"""allreduce.json: what was asked of the exchange between sites, and what it took.

All times are seconds, all sizes bytes. The file is written anew after each measurement.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

from orchestrator.evidence.bench.record import Failed
from orchestrator.run_folder.run_files import strict_json, write_atomically

ALLREDUCE = "allreduce.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked, of every setting alike."""

    topology: str
    """Its file."""
    overrides: tuple[str, ...]
    """As given with --set."""
    warmup: int
    """Repetitions before those that count."""
    repeats: int
    is_one_rank_a_site: bool
    """Else as many as the topology says."""
    is_copied: bool
    """The tensor lies in memory of the rank's own; else in what it shares with its gateway."""
    against: str | None
    """`gloo`, where that was measured too."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long each repetition took, from the last site's begin to the last one's end."""

    cold_s: float
    """The first of all: connections' windows and the memory of buffers are new."""
    all_s: tuple[float, ...]
    """Those after the warm-up."""

    @property
    def median_s(self) -> float:
        """Of those after the warm-up, as the next two."""
        return statistics.median(self.all_s)

    @property
    def min_s(self) -> float:
        """The fastest."""
        return min(self.all_s)

    @property
    def max_s(self) -> float:
        """The slowest."""
        return max(self.all_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One directed link, in the median repetition."""

    source: str
    target: str
    sent_bytes: float
    """Of frames, headers included; what TCP and IP add is not in it."""
    share: float | None
    """Of what the link could have carried in that time; null where it is not emulated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one setting came to."""

    times: Times
    algorithm_bytes_per_s: float
    """float32 bytes of the tensor over the median time."""
    links: tuple[LinkUse, ...]
    site_sent_bytes: float
    """Of the site that sends most."""
    bound_s: float | None
    """What the links allow (orchestrator/evidence/bench/allreduce_figures.py).

    Null where none is emulated.
    """
    over_bound: float | None
    """The median time over it."""
    gateways_cpu_s_per_gb: float
    """The mean over sites, for each 1e9 bytes of float32."""
    ranks_cpu_s_per_gb: float
    relative_error: float
    """Of the result, ‖x - mean‖ ÷ ‖mean‖."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gloo:
    """Gloo's all-reduce of the same tensor, one process a site, on the same links."""

    size_bytes: int
    times: Times
    cpu_s_per_gb: float
    """The mean over sites."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One combination, and its run."""

    size_bytes: int
    codec: str
    tree: str
    """As asked for."""
    plan: str
    """What became of it, in words."""
    run_id: str = ""
    emulator: str = "none"
    """What emulated the WAN: `netns`, `relay` or `none`."""
    figures: Figures | None = None
    failed: Failed | None = None
    over_gloo: float | None = None
    """Gloo's median time over this one's: how many times as fast this is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceBench:
    """The whole file."""

    name: str
    question: Question
    settings: tuple[Setting, ...]
    gloo: tuple[Gloo, ...] = ()
    schema_version: int = 1


def to_json(bench: AllReduceBench) -> dict[str, object]:
    """Return the file's object; times also with what is formed of them."""
    fields = dataclasses.asdict(bench)
    for setting, made in zip(fields["settings"], bench.settings, strict=True):
        if made.figures is not None:
            setting["figures"]["times"] |= _formed(made.figures.times)
    for entry, gloo in zip(fields["gloo"], bench.gloo, strict=True):
        entry["times"] |= _formed(gloo.times)
    return fields


def write(folder: Path, bench: AllReduceBench) -> None:
    """Write allreduce.json; OSError when the disk refuses."""
    write_atomically(folder / ALLREDUCE, strict_json(to_json(bench), indent=1) + "\n")


def _formed(times: Times) -> dict[str, float]:
    return {"median_s": times.median_s, "min_s": times.min_s, "max_s": times.max_s}
