"""One gateway's part in a switch of plans: makes ready for a proposed plan, and answers.

It opens the links that the plan needs, and then has the executor keep the plan for later rounds.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from protos.errors import IsthmusError, LocalProtocolError
from protos.failure import one_line
from sites.gateway.config import GatewayConfig, Proposal
from sites.gateway.links.peer_links import PeerLinks
from sites.gateway.ranks.rank_encoding import RankEncoding
from sites.gateway.reduction.executor import Executor
from topology.errors import ConfigError

_log = logging.getLogger(__name__)

_OPEN_SHARE = 1 / 3
"""Share of `peer_lost_s` that a new link's first answer may take. The attempt that is under way
then may take as much again.

The coordinator waits for `peer_lost_s` in all, and ranks elsewhere may wait for it meanwhile. So a
link that cannot be had is reported before that, by name."""


class PlanSwitches:
    """Prepares one gateway for other plans. All methods may be called from any thread."""

    def __init__(
        self,
        config: GatewayConfig,
        executor: Executor,
        links: PeerLinks,
        encoding: RankEncoding,
        write: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._config = config
        self._executor = executor
        self._links = links
        self._encoding = encoding
        self._write = write
        self._lock = threading.Lock()
        self._told_epoch = 0
        self._preparing = threading.Lock()
        """Held while a proposal is prepared: two at once would count on links that the other one is
        still opening, and closes again."""

    def prepare(self, proposal: Proposal) -> None:
        """Begin to make ready; the answer may take as long as new links do."""
        threading.Thread(
            target=self._prepare, args=(proposal,), name="prepare-plan", daemon=True
        ).start()

    def note_begun(self) -> None:
        """A rank has posted something: tell the agent once, if that began another plan's rounds."""
        begun = self._executor.begun
        if begun is None or begun.epoch == self._told_epoch:
            return
        with self._lock:
            if begun.epoch == self._told_epoch:
                return
            self._told_epoch = begun.epoch
        _log.info("plan %d carries rounds from %d on", begun.epoch, begun.round)
        self._write({"op": "plan_begun", "epoch": begun.epoch, "round": begun.round})

    def _prepare(self, proposal: Proposal) -> None:
        why, is_fixed = "", False
        accepted, round_ = False, self._executor.round
        try:
            with self._preparing:
                why = self._problem(proposal)
                if not why:
                    why = self._encoding.problem_with(proposal.plan, proposal.codecs)
                    is_fixed = bool(why)
                why = why or self._connect(proposal)
                if not why:
                    accepted, round_ = self._executor.propose(proposal)
                if accepted:
                    why = self._recheck(proposal)
                    accepted = not why
        except IsthmusError as error:
            why = one_line(str(error))
        except Exception as error:  # noqa: BLE001 - a thread's root; the coordinator waits
            _log.exception("plan %d was not prepared", proposal.epoch)
            why = one_line(f"{type(error).__name__}: {error}")
        is_late = not accepted and not why
        self._write(
            {
                "op": "plan_prepared",
                "epoch": proposal.epoch,
                "accepted": accepted,
                "hash": proposal.hash,
                "round": round_,
                "late": is_late,
                "codecs_fixed": is_fixed,
                "why": f"round {round_} has begun" if is_late else why,
            }
        )

    def _problem(self, proposal: Proposal) -> str:
        """Return why a plan cannot be one of this run's; nothing if it can."""
        try:
            dataclasses.replace(self._config, plan=proposal.plan, codecs=proposal.codecs)
        except ConfigError as error:
            return error.problems[0].message
        return ""

    def _connect(self, proposal: Proposal) -> str:
        """Open the links that a plan needs beside those there are; return why not, or nothing."""
        try:
            added = self._links.add(proposal.plan.neighbours(self._config.site_index))
        except LocalProtocolError as error:
            return str(error)
        failures = self._links.open(added.values(), _OPEN_SHARE * self._config.peer_lost_s)
        if failures:
            self._links.drop(added)
            return failures[0].message
        return ""

    def _recheck(self, proposal: Proposal) -> str:
        """Look again for the links of a plan that is kept now; if one is lost, forget the plan.

        A link may have been lost just before. Once the plan is kept, a link that is lost ends the
        run. Return which link is lost, or nothing.
        """
        missing = self._links.missing(proposal.plan.neighbours(self._config.site_index))
        if not missing:
            return ""
        self._executor.decide(proposal.epoch, commit=False)
        return f"the link to site {missing[0]} was lost just now"
