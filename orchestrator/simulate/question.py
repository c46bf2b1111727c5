"""Which jobs a simulation is of: documents of every setting of a sweep, checked before the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.bench.record import Sweep
from orchestrator.bench.sweep import blame_sweep, overrides_of, points
from orchestrator.documents import Pair, load_pair
from topology.errors import ConfigError, Problem
from topology.overrides import read_with_overrides


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a sweep."""

    overrides: dict[str, str]
    """Path as in --sweep, and value."""
    pair: Pair


def load_settings(base: Pair, overrides: Sequence[str], sweeps: Sequence[Sweep]) -> list[Point]:
    """Return the settings in the order of the sweep.

    Args:
        base: the documents without any sweep.
        overrides: each --set.
        sweeps: as parsed.

    Raises:
        ConfigError: a document has mistakes in some setting, or the job has a script of its own, or
            trains nothing.
    """
    _require_simulated(base)
    documents = [
        read_with_overrides(base.topology_text, str(base.topology_path), base.topology_overrides),
        read_with_overrides(base.job_text, str(base.job_path), base.job_overrides),
    ]
    found = []
    for point in points(sweeps):
        swept = overrides_of(point, documents)
        try:
            pair = load_pair(base.job_path, [*overrides, *swept], base.topology_path)
        except ConfigError as error:
            raise blame_sweep(error, point) from error
        found.append(Point(point, pair))
    return found


def _require_simulated(pair: Pair) -> None:
    if pair.job.entrypoint is not None:
        raise _refused(
            pair,
            "entrypoint",
            "nothing is known of how long a script computes: leave it out, and give trainer.model the "
            "shape of its model",
        )
    if pair.job.probe is not None:
        raise _refused(
            pair, "probe", "measures links and trains nothing: there is nothing to simulate"
        )


def _refused(pair: Pair, path: str, message: str) -> ConfigError:
    return ConfigError([Problem(str(pair.job_path), 0, 0, message, path)])
