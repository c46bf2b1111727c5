"""`--sweep PATH=V1,V2`: which values, of which places in the documents, make the settings. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from orchestrator.evidence.bench.record import Sweep
from topology.errors import ConfigError, Problem
from topology.text.document import Document

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
        [
            Problem(
                _blamed(problem.source, point),
                problem.line,
                problem.column,
                problem.message,
                problem.path,
                problem.excerpt,
            )
            for problem in error.problems
        ]
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
