"""The settings that the --sweeps of a benchmark or a simulation make, and the documents of each.

All are loaded and checked before the first run starts. What a site runs by itself is said as
overrides of the same documents, so that a solo run is an ordinary run, and can be repeated by hand
with `isthmus launch --set`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.orchestrator.documents import Pair, load_pair
from isthmus.orchestrator.evidence.record.bench_record import Question, Sweep
from isthmus.orchestrator.plans import as_launched
from isthmus.topology.spec.compute import site_shares
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.hashing import config_hash
from isthmus.topology.spec.world import Site
from isthmus.topology.text.yaml_document import Document
from isthmus.topology.text.yaml_document import Path as DocumentPath

MAX_SETTINGS = 500
"""At a minute a run, two days of one repeat: more is a slip of the keyboard."""
SHORT = {"codec": "exchange.codec"}
"""Paths that may be written without what stands before them."""
_FIXED = {
    "trainer.steps": "is what --steps and --warmup say",
    "trainer.evaluate_every": "is fixed: nothing is evaluated between the measured steps",
    "trainer.compute": "is what --compute says, for all settings",
    "emulate": "is fixed: links are always emulated",
}
"""What a benchmark sets by itself, and why it may not be swept."""
_CLOSING = {"[": "]", "{": "}"}


def parse_sweep(text: str) -> Sweep:
    """Return the path and the values of one --sweep.

    Raises:
        ConfigError: it is not PATH=V1,V2, a value is repeated, or the path may not be swept.
    """
    path, equals, values_text = text.partition("=")
    values = tuple(value.strip() for value in _split(values_text))
    if not equals or "" in path.split(".") or "" in values:
        raise _refused(path, "want PATH=V1,V2, as --sweep 'links.*.rtt=5ms,20ms'")
    if path in _FIXED:
        raise _refused(path, _FIXED[path])
    if len(set(values)) < len(values):
        raise _refused(path, "has a value twice")
    return Sweep(path=path, values=values)


def parse_sweeps(texts: Sequence[str]) -> tuple[Sweep, ...]:
    """Return every sweep; ConfigError also for a path that stands twice, or too many settings."""
    sweeps = tuple(parse_sweep(text) for text in texts)
    paths = [SHORT.get(sweep.path, sweep.path) for sweep in sweeps]
    num_settings = 1
    for index, sweep in enumerate(sweeps):
        if paths.index(paths[index]) < index:
            raise _refused(sweep.path, "is swept twice: name all its values in one --sweep")
        num_settings *= len(sweep.values)
    if num_settings > MAX_SETTINGS:
        raise _refused(
            sweeps[-1].path, f"makes {num_settings} settings: want at most {MAX_SETTINGS}"
        )
    return sweeps


def points(sweeps: Sequence[Sweep]) -> Iterator[dict[str, str]]:
    """Yield every combination of values by path, the last path's changing fastest."""
    for values in itertools.product(*(sweep.values for sweep in sweeps)):
        yield dict(zip((sweep.path for sweep in sweeps), values, strict=True))


def overrides_of(point: dict[str, str], documents: Sequence[Document]) -> list[str]:
    """Return the --set of one combination: a `*` stands for every position of a list.

    Args:
        point: Value by path.
        documents: Topology and job: whichever has the list gives its length.

    Raises:
        ConfigError: there is no list where a `*` stands, or nothing in it.
    """
    return [
        f"{path}={value}"
        for written, value in point.items()
        for path in _expand(written, SHORT.get(written, written).split("."), documents)
    ]


def blame_sweep(error: ConfigError, point: dict[str, str]) -> ConfigError:
    """Return the error with each problem of a sweep's own override told at that --sweep."""
    return ConfigError(
        [dataclasses.replace(each, source=_blamed(each.source, point)) for each in error.problems]
    )


def _blamed(source: str, point: dict[str, str]) -> str:
    name = source.removeprefix("--set ")
    for path, value in point.items():
        if name != source and _covers(SHORT.get(path, path).split("."), name.split(".")):
            return f"--sweep {path}={value}"
    return source


def _covers(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    return len(pattern) == len(parts) and all(
        one in ("*", other) for one, other in zip(pattern, parts, strict=True)
    )


def _expand(written: str, parts: Sequence[str], documents: Sequence[Document]) -> list[str]:
    """Return the paths that a pattern stands for."""
    if "*" not in parts:
        return [".".join(parts)]
    place = parts.index("*")
    before = [int(part) if part.isdecimal() else part for part in parts[:place]]
    length = max(len(document.sequence(*before)) for document in documents)
    if length == 0:
        where = ".".join(parts[:place]) or "the document"
        raise _refused(written, f"{where} is no list with something in it: a * has no place there")
    return [
        path
        for index in range(length)
        for path in _expand(written, [*parts[:place], str(index), *parts[place + 1 :]], documents)
    ]


def _split(text: str) -> Iterator[str]:
    """Yield the parts of `text` between commas, those inside brackets aside."""
    start, open_brackets = 0, []
    for index, character in enumerate(text):
        if character in _CLOSING:
            open_brackets.append(_CLOSING[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
        elif character == "," and not open_brackets:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _refused(path: str, message: str) -> ConfigError:
    return ConfigError([Problem(f"--sweep {path}", 0, 0, message, path)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting."""

    overrides: dict[str, str]
    """Path as in --sweep, and value."""
    together: Pair
    """The documents of what all sites run together."""
    plan: str | None = None
    """What a plan decided, in a line, where the job asks for one."""
    solo: Mapping[str, Pair] = field(default_factory=dict)
    """What each site runs by itself; empty in a simulation, which needs no documents for it."""
    solo_keys: Mapping[str, str] = field(default_factory=dict)
    """By site: equal where solo runs are, in whichever settings."""

    @property
    def said(self) -> str:
        """What tells this setting from the others, to begin a line with; empty without a sweep."""
        values = " ".join(f"{path}={value}" for path, value in self.overrides.items())
        return f"{values}: " if values else ""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run to make."""

    repeat: int
    setting: int
    site: str | None
    """None: all together."""
    key: str
    """Equal where runs of the same site are repeats of each other, in whichever settings."""


def load_points(question: Question, job_path: Path, topology_path: Path | None) -> list[Point]:
    """Return a benchmark's settings in the order of the sweep.

    Raises:
        ConfigError: a document has mistakes in some setting, or two settings are the same.
    """
    base = load_pair(job_path, question.overrides, topology_path)
    found: list[Point] = []
    seen: set[str] = set()
    for point in _swept(base, question.sweeps, lambda swept: _together(question, base, swept)):
        pair = point.together
        key = config_hash(pair.job, pair.described)  # a plan may leave out what is swept
        if key in seen:
            raise _no_difference(question, point.overrides)
        seen.add(key)
        if pair.job.entrypoint is not None and pair.job.trainer.compute == "modelled":
            message = (
                "compute is modelled for the trainer that ships only: with a script of your "
                "own want --compute real"
            )
            raise ConfigError([Problem(str(pair.job_path), 0, 0, message, "entrypoint")])
        solo = {site.name: alone(pair, site) for site in pair.topology.sites}
        keys = {site: config_hash(each.job, each.topology) for site, each in solo.items()}
        found.append(dataclasses.replace(point, solo=solo, solo_keys=keys))
    return found


def load_simulated_points(
    base: Pair, overrides: Sequence[str], sweeps: Sequence[Sweep]
) -> list[Point]:
    """Return a simulation's settings in the order of the sweep.

    Raises:
        ConfigError: a document has mistakes in some setting, or no plan, or the job has a script of
            which nothing is known, or trains nothing.
    """

    def load(swept: Sequence[str]) -> tuple[Pair, str | None]:
        pair = load_pair(base.job_path, [*overrides, *swept], base.topology_path)
        _require_known(pair)
        pair, plan = as_launched(pair)
        _require_cut(pair)
        return pair, plan

    _require_known(base)
    return list(_swept(base, sweeps, load))


def _swept(
    base: Pair,
    sweeps: Sequence[Sweep],
    load: Callable[[Sequence[str]], tuple[Pair, str | None]],
) -> Iterator[Point]:
    """Yield each combination with what `load` makes of its --set; a mistake names its --sweep."""
    documents = [base.topology_document, base.job_document]
    for values in points(sweeps):
        swept = overrides_of(values, documents)
        try:
            pair, plan = load(swept)
        except ConfigError as error:
            raise blame_sweep(error, values) from error
        yield Point(overrides=values, together=pair, plan=plan)


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
                    yield Planned(repeat, index, site, key)
            yield Planned(repeat, index, None, str(index))


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
        if not pair.job.regime.is_sync:
            off.append("regime=sync")
        decided = [*pair.topology_document.overrides, *pair.job_document.overrides]
        pair = load_pair(base.job_path, [*decided, *off], base.topology_path)
    return pair, plan


def _no_difference(question: Question, point: dict[str, str]) -> ConfigError:
    said = " ".join(f"--sweep {path}={value}" for path, value in point.items())
    paths = [SHORT.get(sweep.path, sweep.path) for sweep in question.sweeps]
    hint = ": a measured figure of a link wins over the described one"
    reason = hint if any(path.startswith("links.") for path in paths) else ""
    return ConfigError(
        [Problem(said, 0, 0, f"makes no difference to another setting{reason}", paths[-1])]
    )


def _require_known(pair: Pair) -> None:
    """Refuse a job of which nobody knows how long it computes."""
    if pair.job.entrypoint is not None and pair.job.workload is None:
        raise _mistake(
            pair,
            ("entrypoint",),
            "nothing is known of how long a script computes: describe its model in a `workload` "
            "section, or leave the script out and give trainer.model the shape of its model",
        )
    if pair.job.probe is not None:
        raise _mistake(
            pair, ("probe",), "measures links and trains nothing: there is nothing to simulate"
        )


def _require_cut(pair: Pair) -> None:
    """Refuse a described model that nobody has cut over the sites."""
    model = pair.job.workload
    if model is None:
        return
    if not pair.job.placement:
        raise _mistake(
            pair,
            ("workload",),
            "says nothing of how each site cuts the model: want a `plan` section, which decides "
            "it, or a `placement` with `parallel`, as `isthmus plan` writes it",
        )
    for index, placed in enumerate(pair.job.placement):
        path: DocumentPath = ("placement", index)
        if placed.parallel is None:
            raise _mistake(pair, path, "want `parallel`: how this site cuts the model")


def _mistake(pair: Pair, path: DocumentPath, message: str) -> ConfigError:
    return ConfigError([pair.job_document.problem(path, message)])


def alone(pair: Pair, site: Site) -> Pair:
    """Return the documents of `site`'s solo run; `pair` is what all sites run together.

    Nothing in it depends on links, codecs or trees, so many settings share one solo run. The job is
    placed at this site only, and the exchange is off. Its settings are the defaults, except the
    size of buckets, for ranks inside the site reduce these, too.
    """
    document = pair.job_document
    share = sum(site_shares(pair.job, pair.topology, site))
    bucket = document.get("exchange", "bucket")
    exchange = {"schedule": "off", **({} if bucket is None else {"bucket": bucket})}
    own = [
        _override("emulate", False),
        _override("exchange", exchange),
        _override("reduction", {}),
        _override("verify", {"parameters_every": 0}),
        _override("timeline", {"every": 0}),
        _override("trainer.global_batch", share),
        _override("placement", [{"site": site.name, "sequences": share}]),
        # No other regime goes with an exchange that is off.
        *([] if pair.job.regime.is_sync else [_override("regime", "sync")]),
        # Placed as it is, there is nothing to plan, and what a plan might decide is no difference.
        *([] if document.get("plan") is None else [_override("plan", {})]),
    ]
    overrides = [*pair.topology_document.overrides, *pair.job_document.overrides, *own]
    return load_pair(pair.job_path, overrides, pair.topology_path)


def _override(path: str, value: object) -> str:
    # JSON is YAML in which a text cannot be taken for anything else: `off` stays a word.
    return f"{path}={json.dumps(value, ensure_ascii=False)}"
