"""An epoch: the members of a run, and their trees, from some round on. Pure.

Every change of members or trees has two phases. Sites *settle*: they begin no new round, stop all
chunks if a site is lost, and report their finished chunks. Then they *resume* in a new epoch. A
chunk that one site has finished is handed over to the others; every other chunk is repeated by the
new members. So all members have the same bits for each chunk.

Chunks are listed as *runs*: pairs of first and last number of consecutive chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from isthmus.topology.spec.json_fields import json_bytes, json_of, read_json, to_json
from isthmus.topology.spec.regime import AS_LAUNCHED, Rung
from isthmus.topology.spec.run_spec import CodedPlan
from isthmus.topology.spec.shares import AS_BEGUN, Shares

Runs = tuple[tuple[int, int], ...]
"""(first, last) of consecutive chunks; ascending, with a gap between any two runs."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """The members of a run and their trees, from a round on."""

    number: int
    """Number of the epoch, ascending. 0: the initial sites and reduction."""
    members: tuple[str, ...]
    """Names of the members, in the run's order."""
    reduction: CodedPlan
    from_round: int
    """First round of the epoch. After a loss, the oldest round that is not finished at all
    sites."""
    follows: tuple[str, ...] = ()
    """Members that are catching up: they only get results, and no site waits for them."""
    shares: Shares = AS_BEGUN
    """What sites get of the batch. Ranks change to it some rounds later than `from_round`
    (sites/worker/exchange/member_history.py)."""
    rung: Rung = AS_LAUNCHED
    """The regime. Ranks change to it as they do to other shares, and as soon as all know."""

    def to_bytes(self) -> bytes:
        """Serialise: the same value gives the same bytes."""
        return json_bytes(to_json(self))

    @classmethod
    def from_bytes(cls, written: bytes) -> Epoch:
        """Parse the bytes of `to_bytes`.

        Raises:
            ConfigError: It did not, or this build does not know all of it.
        """
        return read_json(cls, json_of(written, "the epoch"))


@dataclass(frozen=True, slots=True)
class Finished:
    """Chunks of one bucket that a site has finished."""

    round: int
    bucket: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class Handover:
    """Chunks that one site has finished, and hands over to another."""

    donor: str
    receiver: str
    round: int
    bucket: int
    runs: Runs


def finished_to_bytes(finished: Iterable[Finished]) -> bytes:
    """Serialise a site's finished chunks."""
    return json_bytes(to_json(tuple(finished)))


def finished_from_bytes(written: bytes) -> tuple[Finished, ...]:
    """Parse the bytes of `finished_to_bytes`.

    Raises:
        ConfigError: It did not.
    """
    return read_json(tuple[Finished, ...], json_of(written, "what is finished"))


def handovers_to_bytes(handovers: Iterable[Handover]) -> bytes:
    """Serialise handovers."""
    return json_bytes(to_json(tuple(handovers)))


def handovers_from_bytes(written: bytes) -> tuple[Handover, ...]:
    """Parse the bytes of `handovers_to_bytes`.

    Raises:
        ConfigError: It did not.
    """
    return read_json(tuple[Handover, ...], json_of(written, "handovers"))


def runs_of(numbers: Iterable[int]) -> Runs:
    """Return chunk numbers, given in any order, as runs."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return tuple(runs)


def numbers_of(runs: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield the numbers of the chunks, run by run."""
    for first, last in runs:
        yield from range(first, last + 1)


def union(*parts: Runs) -> Runs:
    """Return the union of several sets of runs."""
    return runs_of(number for runs in parts for number in numbers_of(runs))


def merged(parts: Iterable[Finished]) -> tuple[Finished, ...]:
    """Merge the finished chunks of several gateways: each bucket once, in order."""
    found: dict[tuple[int, int], list[Runs]] = {}
    for each in parts:
        found.setdefault((each.round, each.bucket), []).append(each.runs)
    return tuple(Finished(*key, union(*found[key])) for key in sorted(found))
