"""What the directed links of a run have carried, over all gateways and all of their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from isthmus.protos import metrics

Pair = tuple[str, str]
"""The sites that a link leads from and to."""
_SUMMED = (metrics.SENT_BYTES, metrics.RAW_BYTES, metrics.SENT_FRAMES, metrics.LIMITED_BYTES)


class LinkTotals:
    """Adds up what gateways tell. A gateway that starts again counts from 0."""

    def __init__(self) -> None:
        self._by_process: dict[Pair, dict[str, dict[str, Mapping[str, float]]]] = {}
        """The last totals of each link: by gateway, and by the process that has counted."""
        self._made: dict[Pair, dict[str, float]] = {}
        """As `of` made them last, of those that have not changed since."""

    def add(self, site: str, values: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Take what a site tells of a link of its own; of others' nothing is taken."""
        if labels.get("source") != site:
            return
        pair = (site, labels.get("target", ""))
        by_process = self._by_process.setdefault(pair, {}).setdefault(labels.get("gateway", ""), {})
        by_process[labels.get(metrics.PROCESS, "")] = values
        self._made.pop(pair, None)

    def all(self) -> dict[Pair, dict[str, float]]:
        """Return the totals of each link that was measured. Nobody may change them."""
        return {pair: self.of(pair) for pair in self._by_process}

    def of(self, pair: Pair) -> dict[str, float]:
        """Return those of one link that was measured."""
        made = self._made.get(pair)
        if made is None:
            by_gateway = self._by_process[pair].values()
            made = self._made[pair] = _added(
                [_in_turn([*by_process.values()]) for by_process in by_gateway], max
            )
        return made


def _in_turn(processes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what one gateway has sent over a link, in one process after another."""
    link = _added(processes, sum)
    link.pop(metrics.IDLE_RTT_S, None)
    if metrics.IDLE_RTT_S in processes[-1]:
        link[metrics.IDLE_RTT_S] = processes[-1][metrics.IDLE_RTT_S]
    return link


def _added(
    parts: Sequence[Mapping[str, float]], times: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    """Return the totals of a link from its parts; `times` is `max` if these send at once."""
    link = {name: sum(each.get(name, 0.0) for each in parts) for name in _SUMMED}
    for name in (metrics.BUSY_S, metrics.LIMITED_S):
        link[name] = times(each.get(name, 0.0) for each in parts)
    if link[metrics.BUSY_S] > 0:
        link[metrics.THROUGHPUT_BYTES_PER_S] = link[metrics.SENT_BYTES] / link[metrics.BUSY_S]
    for name in (metrics.RTT_S, metrics.IDLE_RTT_S):
        rtts_s = [each[name] for each in parts if name in each]
        if rtts_s:
            link[name] = min(rtts_s)
    return link
