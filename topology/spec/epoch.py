"""An epoch: who takes part in a run from some round on, and along which trees. Pure.

Every change of members or trees goes in two phases. Sites *settle*: they begin no new round, and
where a site is lost also stop all chunks, and each says which chunks it has finished. Then they
*resume* in a new epoch. What one of them had finished is handed over to the others; every other
chunk is done again among the new members. So all members have the same bits for each chunk.

Chunks are told as *runs*: pairs of the first and the last number of chunks in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from isthmus.topology.spec.json_fields import json_bytes, json_of, read_json, to_json
from isthmus.topology.spec.run_spec import CodedPlan

Runs = tuple[tuple[int, int], ...]
"""First and last number of chunks in a row; ascending, with a gap between any two."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """The members of a run and their trees, from a round on."""

    number: int
    """Rises within a run. 0: the sites and the reduction that the run begins with."""
    members: tuple[str, ...]
    """The sites that take part, by name, in the run's order."""
    reduction: CodedPlan
    from_round: int
    """The first round that it carries. Where a site was lost, the oldest that is not finished
    everywhere."""
    follows: tuple[str, ...] = ()
    """Members that come back and only get the results: nobody waits for them."""

    def to_bytes(self) -> bytes:
        """Serialise: the same value gives the same bytes."""
        return json_bytes(to_json(self, lambda field, item: item != field.default))

    @classmethod
    def from_bytes(cls, written: bytes) -> Epoch:
        """Read what `to_bytes` wrote.

        Raises:
            ConfigError: It did not, or this build does not know all of it.
        """
        return read_json(cls, json_of(written, "the epoch"))


@dataclass(frozen=True, slots=True)
class Finished:
    """Chunks of one bucket whose results a site has."""

    round: int
    bucket: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class Handover:
    """Chunks that one site has finished, and gives to another that has not."""

    donor: str
    receiver: str
    round: int
    bucket: int
    runs: Runs


def finished_to_bytes(finished: Iterable[Finished]) -> bytes:
    """Serialise what a site has finished."""
    return json_bytes(to_json(tuple(finished)))


def finished_from_bytes(written: bytes) -> tuple[Finished, ...]:
    """Read what `finished_to_bytes` wrote.

    Raises:
        ConfigError: It did not.
    """
    return read_json(tuple[Finished, ...], json_of(written, "what is finished"))


def handovers_to_bytes(handovers: Iterable[Handover]) -> bytes:
    """Serialise who gives whom what."""
    return json_bytes(to_json(tuple(handovers)))


def handovers_from_bytes(written: bytes) -> tuple[Handover, ...]:
    """Read what `handovers_to_bytes` wrote.

    Raises:
        ConfigError: It did not.
    """
    return read_json(tuple[Handover, ...], json_of(written, "handovers"))


def runs_of(numbers: Iterable[int]) -> Runs:
    """Return some chunks' numbers, in any order, as runs."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return tuple(found)


def numbers_of(runs: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield the numbers of the chunks, run by run."""
    for first, last in runs:
        yield from range(first, last + 1)


def union(*parts: Runs) -> Runs:
    """Return the runs of the chunks that are in any of these."""
    return runs_of(number for runs in parts for number in numbers_of(runs))


def difference(runs: Runs, others: Runs) -> Runs:
    """Return the runs of the chunks that are in the first, and not in the second."""
    return runs_of(set(numbers_of(runs)) - set(numbers_of(others)))


def merged(parts: Iterable[Finished]) -> tuple[Finished, ...]:
    """Return what several gateways have finished, together: a bucket at most once, in order."""
    found: dict[tuple[int, int], list[Runs]] = {}
    for each in parts:
        found.setdefault((each.round, each.bucket), []).append(each.runs)
    return tuple(Finished(*key, union(*found[key])) for key in sorted(found))
