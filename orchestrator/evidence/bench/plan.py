"""The runs that a question takes.

Documents of every setting, checked before the first run starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.documents import Pair, load_pair
from orchestrator.evidence.bench.alone import alone
from orchestrator.evidence.bench.record import Question
from orchestrator.evidence.bench.sweep import SHORT, blame_sweep, overrides_of, points
from orchestrator.plans import as_launched
from topology.errors import ConfigError, Problem
from topology.hashing import config_hash
from topology.text.overrides import read_with_overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting: what all sites run together, and each by itself."""

    overrides: dict[str, str]
    """Path as in --sweep, and value."""
    together: Pair
    solo: Mapping[str, Pair]
    """By site."""
    solo_keys: Mapping[str, str]
    """By site: equal where solo runs are, in whichever settings."""
    plan: str | None = None
    """What a plan decided, in a line, where the job asks for one."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run to make."""

    repeat: int
    setting: int
    site: str | None
    """None: all together."""


def load_points(question: Question, job_path: Path, topology_path: Path | None) -> list[Point]:
    """Return the settings in the order of the sweep.

    Raises:
        ConfigError: a document has mistakes in some setting, or two settings are the same.
    """
    base = load_pair(job_path, question.overrides, topology_path)
    documents = [
        read_with_overrides(base.topology_text, str(base.topology_path), base.topology_overrides),
        read_with_overrides(base.job_text, str(base.job_path), base.job_overrides),
    ]
    found: list[Point] = []
    seen: set[str] = set()
    for point in points(question.sweeps):
        swept = overrides_of(point, documents)
        try:
            pair, plan = _together(question, base, swept)
        except ConfigError as error:
            raise blame_sweep(error, point) from error
        key = config_hash(pair.job, pair.described)  # a plan may leave out what is swept
        if key in seen:
            raise _no_difference(question, point)
        seen.add(key)
        found.append(_point(point, pair, plan))
    return found


def planned_runs(points: Sequence[Point], repeats: int) -> Iterator[Planned]:
    """Yield the runs in their order: every setting once, then every setting again.

    Solo runs that settings share are made once a repeat, before the first run that is divided by
    them, so that both sides of a division are close in time.
    """
    for repeat in range(repeats):
        made: set[str] = set()
        for index, point in enumerate(points):
            for site, key in point.solo_keys.items():
                if key not in made:
                    made.add(key)
                    yield Planned(repeat, index, site)
            yield Planned(repeat, index, None)


def _together(question: Question, base: Pair, swept: Sequence[str]) -> tuple[Pair, str | None]:
    """Load what all sites run together.

    The user's values, then ours, then the sweep's, then a plan's.

    Without an exchange there is nothing to plan: the plan is that of the job with one.
    """
    steps = question.warmup_steps + question.steps
    overrides = [
        *question.overrides,
        # On this machine nothing else could be between the sites that the topology describes.
        f"emulate={json.dumps(len(base.topology.sites) > 1)}",
        f"trainer.compute={question.compute}",
        f"trainer.steps={steps}",
        f"trainer.evaluate_every={steps}",
        "trainer.evaluation_batches=1",
        *(["exchange.schedule=serial"] if question.schedule == "serial" else []),
        *([] if question.emulator is None else [f"emulator={question.emulator}"]),
        *swept,
    ]
    pair, plan = as_launched(load_pair(base.job_path, overrides, base.topology_path))
    if question.schedule == "off" or pair.job.exchange.schedule == "off":
        # Sites that exchange nothing have parameters of their own.
        off = ["exchange.schedule=off", "verify.parameters_every=0"]
        decided = [*pair.topology_overrides, *pair.job_overrides]
        pair = load_pair(base.job_path, [*decided, *off], base.topology_path)
    return pair, plan


def _point(overrides: dict[str, str], pair: Pair, plan: str | None) -> Point:
    if pair.job.entrypoint is not None and pair.job.trainer.compute == "modelled":
        raise ConfigError(
            [
                Problem(
                    str(pair.job_path),
                    0,
                    0,
                    "compute is modelled for the trainer that ships only: with a script of your "
                    "own want --compute real",
                    "entrypoint",
                )
            ]
        )
    solo = {site.name: alone(pair, site) for site in pair.topology.sites}
    return Point(
        overrides=overrides,
        together=pair,
        solo=solo,
        plan=plan,
        solo_keys={site: config_hash(each.job, each.topology) for site, each in solo.items()},
    )


def _no_difference(question: Question, point: dict[str, str]) -> ConfigError:
    said = " ".join(f"--sweep {path}={value}" for path, value in point.items())
    hint = "a measured figure of a link wins over the described one"
    paths = [SHORT.get(sweep.path, sweep.path) for sweep in question.sweeps]
    reason = f": {hint}" if any(path.startswith("links.") for path in paths) else ""
    return ConfigError(
        [Problem(said, 0, 0, f"makes no difference to another setting{reason}", paths[-1])]
    )
