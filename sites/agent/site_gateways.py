"""Combines a site's gateways: passes epoch changes on to all, and merges their answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import asdict

from isthmus.protos.control.v1.control_pb2 import (
    Reached,
    Resume,
    Resumed,
    Settle,
    Settled,
    Suspect,
)
from isthmus.sites.gateway import agent_port
from isthmus.sites.node.failures import SiteError
from isthmus.topology.spec.epoch import (
    Epoch,
    finished_to_bytes,
    handovers_from_bytes,
    merged,
)
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.run_spec import CodedPlan

Answer = agent_port.Settled | agent_port.Resumed
Tell = Callable[[agent_port.Command], None]
"""Sends one line to all of the site's gateways."""
Put = Callable[[Settled | Resumed], None]
"""Sends a message to the coordinator; the callee adds run and generation."""


class EpochChange:
    """Passes a run's epoch changes on to the site's gateways, and their merged answers back.

    Each chunk belongs to one gateway of the site, so their finished chunks add up.
    """

    def __init__(self, num_gateways: int, tell: Tell, put: Put) -> None:
        """`tell` sends to all gateways of the site, `put` to the coordinator."""
        self._num_gateways = num_gateways
        self._tell, self._put = tell, put
        self.epoch = 0
        """Epoch that all gateways of the site use."""
        self._waits_for: tuple[type[Answer], int] | None = None
        """Kind and epoch of the answers that are being collected; None: of none."""
        self._answers: list[Answer] = []

    def settle(self, message: Settle) -> None:
        """Have the gateways pause at a round boundary and report, and stop chunks if asked."""
        self._expect(agent_port.Settled, message.epoch)
        try:
            reduction = CodedPlan.from_bytes(message.reduction) if message.reduction else None
        except ConfigError as error:
            self._put(Settled(epoch=message.epoch, round=-1, why=error.problems[0].message))
            return
        self._tell(agent_port.Settle(epoch=message.epoch, stops=message.stops, reduction=reduction))

    def cancel(self, epoch: int) -> None:
        """Have the gateways go on as before."""
        self._waits_for = None
        self._tell(agent_port.Cancel(epoch=epoch))

    def resume(self, message: Resume) -> Epoch:
        """Have the gateways go on in a new epoch, and return it.

        Raises:
            SiteError: this build cannot read the message.
        """
        try:
            epoch = Epoch.from_bytes(message.record)
            handovers = handovers_from_bytes(message.handovers or b"[]")
        except ConfigError as error:
            raise SiteError("PROTOCOL_VIOLATION", error.problems[0].message) from error
        self._expect(agent_port.Resumed, epoch.number)
        self._tell(
            agent_port.Resume(epoch=epoch, handovers=handovers, enters=tuple(message.enters))
        )
        return epoch

    def answered(self, answer: Answer) -> None:
        """Take a gateway's answer; answer for the site once all gateways have.

        While the site is catching up, the first gateway that could rejoin answers for all.
        """
        if isinstance(answer, agent_port.Resumed) and answer.epoch == self.epoch:
            self._put(Resumed(epoch=self.epoch, round=answer.round, behind=answer.behind))
            return
        if (type(answer), answer.epoch) != self._waits_for:
            return
        self._answers.append(answer)
        if len(self._answers) < self._num_gateways:
            return
        round_ = max(each.round for each in self._answers)
        if isinstance(answer, agent_port.Resumed):
            self.epoch = answer.epoch
            self._put(Resumed(epoch=answer.epoch, round=round_))
            return
        settled = [each for each in self._answers if isinstance(each, agent_port.Settled)]
        chain_round, chain = _chain([each.chains for each in settled])
        self._put(
            Settled(
                epoch=answer.epoch,
                round=round_,
                finished=finished_to_bytes(
                    merged(part for each in settled for part in each.finished)
                ),
                chain=chain,
                chain_round=chain_round,
                why=next((each.why for each in settled if each.why), ""),
                codecs_fixed=any(each.codecs_fixed for each in settled),
            )
        )

    def _expect(self, kind: type[Answer], epoch: int) -> None:
        self._waits_for, self._answers = (kind, epoch), []


class Opinions:
    """Merges the gateways' suspicions of other sites into one suspicion per site."""

    def __init__(self, site: str) -> None:
        """Begin with no suspicion; `site` is the gateways' own."""
        self._site = site
        self._by_site: dict[str, dict[int, Suspect]] = {}
        """Suspicions by suspected site and own gateway."""
        self._members: Container[str] | None = None
        """Members of the epoch; None: the run's first."""

    def take(
        self, gateway: int, message: agent_port.Suspect | agent_port.Reached
    ) -> Suspect | Reached | None:
        """Record a gateway's suspicion or its end; return the merged one if it changed.

        A site is suspected while any gateway suspects it, and it is a member.
        """
        site = message.site
        if self._members is not None and site not in self._members:
            return None
        before = self._of(site)
        if isinstance(message, agent_port.Reached):
            self._by_site.get(site, {}).pop(gateway, None)
        else:
            self._by_site.setdefault(site, {})[gateway] = Suspect(**asdict(message))
        now = self._of(site)
        if (now is None) == (before is None) and (
            now is None or before is None or now.is_gone == before.is_gone
        ):
            return None
        return Reached(site=site) if now is None else now

    def suspects(self) -> list[Suspect]:
        """Return the current suspicions."""
        found = (self._of(site) for site in self._by_site)
        return [each for each in found if each is not None]

    def begin(self, epoch: Epoch, enters: Collection[str]) -> list[str]:
        """Drop suspicions of sites that are no members, or rejoin; return those sites.

        If the own site rejoins, drop all of them. A coordinator that starts later would take them
        for news of sites that have come back since.
        """
        self._members = epoch.members
        stays = set[str]() if self._site in enters else {*epoch.members}.difference(enters)
        dropped = sorted({*self._by_site}.difference(stays))
        for site in dropped:
            del self._by_site[site]
        return dropped

    def _of(self, site: str) -> Suspect | None:
        opinions = list(self._by_site.get(site, {}).values())
        gone = [each for each in opinions if each.is_gone]
        return next(iter(gone or opinions), None)


def _chain(chains: Sequence[Mapping[int, int]]) -> tuple[int, int]:
    """Return the latest round that all gateways completed, and the sum of their checksums."""
    complete = set.intersection(*(set(each) for each in chains))
    if not complete:
        return -1, 0
    latest = max(complete)
    return latest, sum(each[latest] for each in chains) % (1 << 64)
