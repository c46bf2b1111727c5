"""Which jobs a simulation is of.

Documents of every setting of a sweep, checked before the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.documents import Pair, load_pair
from orchestrator.evidence.bench.sweep_settings import blame_sweep, overrides_of, points
from orchestrator.evidence.record.bench_record import Sweep
from orchestrator.plans import as_launched
from topology.cost.model_shape import degrees_of, misfit, workload_described
from topology.errors import ConfigError
from topology.text.yaml_document import Path, read_with_overrides


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a sweep."""

    overrides: dict[str, str]
    """Path as in --sweep, and value."""
    pair: Pair
    plan: str | None = None
    """What a plan decided, in a line, where the job asks for one."""


def load_settings(base: Pair, overrides: Sequence[str], sweeps: Sequence[Sweep]) -> list[Point]:
    """Return the settings in the order of the sweep.

    Args:
        base: the documents without any sweep.
        overrides: each --set.
        sweeps: as parsed.

    Raises:
        ConfigError: a document has mistakes in some setting, or no plan, or the job has a script of
            which nothing is known, or trains nothing.
    """
    _require_known(base)
    documents = [
        read_with_overrides(base.topology_text, str(base.topology_path), base.topology_overrides),
        read_with_overrides(base.job_text, str(base.job_path), base.job_overrides),
    ]
    found = []
    for point in points(sweeps):
        swept = overrides_of(point, documents)
        try:
            pair = load_pair(base.job_path, [*overrides, *swept], base.topology_path)
            _require_known(pair)
            pair, plan = as_launched(pair)
            _require_cut(pair)
        except ConfigError as error:
            raise blame_sweep(error, point) from error
        found.append(Point(point, pair, plan))
    return found


def _require_known(pair: Pair) -> None:
    """Refuse a job of which nobody knows how long it computes."""
    if pair.job.entrypoint is not None and pair.job.workload is None:
        raise _refused(
            pair,
            ("entrypoint",),
            "nothing is known of how long a script computes: describe its model in a `workload` "
            "section, or leave the script out and give trainer.model the shape of its model",
        )
    if pair.job.probe is not None:
        raise _refused(
            pair, ("probe",), "measures links and trains nothing: there is nothing to simulate"
        )


def _require_cut(pair: Pair) -> None:
    """Refuse a described model that nobody has cut over the sites, or that cannot be cut so."""
    model = pair.job.workload
    if model is None:
        return
    if not pair.job.placement:
        raise _refused(
            pair,
            ("workload",),
            "says nothing of how each site cuts the model: want a `plan` section, which decides "
            "it, or a `placement` with `parallel`, as `isthmus plan` writes it",
        )
    for index, placed in enumerate(pair.job.placement):
        path: Path = ("placement", index)
        if placed.parallel is None:
            raise _refused(pair, path, "want `parallel`: how this site cuts the model")
        degrees = degrees_of(placed.parallel, model)
        why = misfit(workload_described(model), degrees)
        if why is not None:
            name, _, message = why.partition(": ")
            raise _refused(pair, (*path, "parallel", name), message)
        if placed.sequences < degrees.data:
            message = f"want at least {degrees.data}, one for each replica; got {placed.sequences}"
            raise _refused(pair, (*path, "sequences"), message)


def _refused(pair: Pair, path: Path, message: str) -> ConfigError:
    document = read_with_overrides(pair.job_text, str(pair.job_path), pair.job_overrides)
    document.add(path, message)
    return ConfigError(document.problems)
