"""Decides who gives whom the chunks that some members of a new epoch have finished and others not.

Pure. Every chunk that any member has finished ends up finished at all of them, from the bytes of
one who has it. Donors take turns, so that the catching up is shared.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

from isthmus.topology.spec.epoch import Handover, Runs


def share_finished(
    round_: int, finished: Mapping[str, Mapping[int, Runs]], ways: Mapping[str, Set[str]]
) -> tuple[Handover, ...]:
    """Return the handovers of one round after which all members have finished the same chunks.

    Args:
        round_: The round; all members have completed those before.
        finished: By member and bucket, the finished chunks. Every member is a key.
        ways: By member, whom it can send to. Where no neighbour of a member has a chunk, one that
            is handed it passes it on: that handover comes later in the result.
    """
    given: dict[str, int] = dict.fromkeys(finished, 0)
    handed: defaultdict[tuple[int, str, str, int], list[tuple[int, int]]] = defaultdict(list)
    for bucket in sorted({bucket for has in finished.values() for bucket in has}):
        runs = {site: finished[site].get(bucket, ()) for site in finished}
        for first, last, holders in _pieces(runs):
            having, hop = set(holders), 0
            while lacking := [site for site in runs if site not in having]:
                reached = set()
                for receiver in lacking:
                    donors = [site for site in finished if site in having & ways[receiver]]
                    if donors:
                        donor = min(donors, key=lambda site: given[site])
                        given[donor] += last - first + 1
                        handed[hop, donor, receiver, bucket].append((first, last))
                        reached.add(receiver)
                assert reached, f"members {lacking} are not linked with the others"
                having |= reached
                hop += 1
    return tuple(
        Handover(donor=donor, receiver=receiver, round=round_, bucket=bucket, runs=_merged(runs))
        for (_, donor, receiver, bucket), runs in sorted(handed.items(), key=lambda each: each[0])
    )


def _pieces(finished: Mapping[str, Runs]) -> Iterator[tuple[int, int, frozenset[str]]]:
    """Yield runs of chunks that some sites have and some not, and who has them.

    They are cut so that each of those can give a part.
    """
    changes: defaultdict[int, list[str]] = defaultdict(list)
    for site, runs in finished.items():
        for first, last in runs:
            changes[first].append(site)
            changes[last + 1].append(site)
    having: set[str] = set()
    cuts = sorted(changes)
    for begin, end in itertools.pairwise(cuts):
        for site in changes[begin]:
            having ^= {site}
        if not 0 < len(having) < len(finished):
            continue
        length = -(-(end - begin) // len(having))
        for first in range(begin, end, length):
            yield first, min(first + length, end) - 1, frozenset(having)


def _merged(runs: list[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and merged[-1][1] + 1 == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)
