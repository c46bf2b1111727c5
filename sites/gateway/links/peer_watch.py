"""Watches a peer gateway: greets it until it answers, then sends heartbeats.

Heartbeats have their own call, where no chunk delays them. Silence counts from the latest answer
or acknowledgement. The answers also give the link's round trip.

The peer sends heartbeats, too. If it answers, but has sent none itself for as long, its own link to
this gateway is down. It is suspected as well, because its frames will not come. The same holds if
it answers but takes no frame: connections are given up one after another (`streams.py`).

A peer that is silent for too long is *suspected*, and one that refuses connections, or has said
that it ends, is suspected of being gone. A suspicion may end: the watch goes on.

A process that was suspended has heard nobody meanwhile. It restarts the peer's deadline, for the
peer may have been suspended with it, and repeats a greeting that was under way.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from isthmus.protos.errors import PeerLostError, StaleGenerationError
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.calls import Call, Target, deadline
from isthmus.sites.gateway.links.send_queue import Outbox
from isthmus.sites.gateway.links.status import CallError
from isthmus.sites.gateway.links.transport import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    HELLO_METHOD,
    details,
    refusal_of,
    say_hello,
)
from isthmus.sites.silence import Silence, Standstills

_log = logging.getLogger(__name__)

_PATIENCE_MIN_S = 0.05

Judge = Callable[[bool, str], None]
"""Callback for a suspected peer: whether it is gone, and why."""


class PeerWatch:
    """Watches one peer, on the event loop. `greet`, then `run`; `hang_up` at the end."""

    def __init__(
        self,
        config: GatewayConfig,
        peer: Target,
        outbox: Outbox,
        *,
        on_suspect: Judge = lambda *_: None,
        on_reached: Callable[[], None] = lambda: None,
    ) -> None:
        """Both callbacks may come from any thread.

        `on_suspect` is called when a suspicion begins, grows or lasts; `on_reached` at its end.
        """
        self.peer = peer
        self._on_suspect, self._on_reached = on_suspect, on_reached
        self._opinion = threading.Lock()
        """Guards the suspicion of the peer."""
        self._is_suspected = False
        self._is_gone = False
        self._has_ended = False
        """The peer has said that it ends; its later answers do not count."""
        self._told_s = 0.0
        self.session = ""
        """This side's session at the peer; empty until the peer has answered."""
        self._config = config
        self._outbox = outbox
        self._heard = Silence(time.monotonic())
        self._reached: Silence | None = None
        """Silence since the peer's latest own heartbeat; None: none has come."""
        self._doubted_s: float | None = None
        """Start of the silence that the previous check found too long; None: it found none."""
        self._standstills = self._begin_looks()
        self._connection = AsyncExitStack()
        """The connection of the call of Hello, if there is one."""
        self._call: Call | None = None

    async def greet(self, within_s: float | None = None) -> None:
        """Greet the peer until it answers; without `within_s` it is only suspected meanwhile.

        Raises:
            ConfigMismatchError: the peer refused: another configuration or protocol.
            StaleGenerationError: the peer refused: another run or generation.
            PeerLostError: no answer within `within_s`, or a third of `peer_lost_s` more. A
                suspension of this process restarts the deadline.
        """
        self._standstills = self._begin_looks()
        self.heard()
        backoff_s = BACKOFF_FIRST_S
        while not self.session:
            try:
                await self._ask(self._config.peer_lost_s / 3)
            except CallError as error:
                self.raise_if_refused(error)
                if within_s is None:
                    await self._judge(error)
                else:
                    self._raise_if_lost(error, within_s)
                await self._wait(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def run(self) -> None:
        """Send heartbeats until the link ends.

        The peer is suspected when it has been silent for `peer_lost_s`, or has sent no heartbeat of
        its own for that long and two checks (one may be unread). A suspension of this process
        restarts the deadline.

        Raises:
            ConfigMismatchError: the peer refused: another configuration or protocol.
        """
        self._standstills = self._begin_looks()
        interval_s = min(self._config.keepalive_time_s, self._config.peer_lost_s / 5)
        while True:
            await self._wait(min(interval_s, self._patience_s))
            if self._outbox.is_over:
                return
            unreached = self._unreached()
            if unreached:
                self.suspect(unreached)
            try:
                await self._ask(min(self._config.peer_lost_s / 3, self._patience_s))
            except CallError as error:
                if self._outbox.is_over:
                    return
                self.note_refusal(error)
                await self._judge(error)
            else:
                if not unreached:
                    self._clear()

    async def hang_up(self) -> None:
        """End the connection; the next greeting opens another."""
        self._call = None
        await self._connection.aclose()

    async def _ask(self, timeout_s: float) -> None:
        """Send Hello once, on the open call or a new one; record the session and the round trip.

        Raises:
            CallError: the peer refused, or did not answer; the connection has ended.
        """
        begun_s, is_idle = time.monotonic(), False
        try:
            async with deadline(timeout_s):
                if self._call is None:
                    self._call = await self._connection.enter_async_context(
                        self.peer.dial(self._config, "", HELLO_METHOD)
                    )
                begun_s, is_idle = time.monotonic(), self._outbox.is_empty
                session = (await say_hello(self._call, self._config)).session
        except CallError:
            await self.hang_up()
            raise
        finally:
            rtt_s = time.monotonic() - begun_s
            stood_still = self._look(timeout_s)
        self.session = self.session or session
        if session != self.session:
            self.suspect(f"{self.peer} is another process by now", is_gone=True, for_good=True)
        self.heard()
        if not stood_still:
            self._outbox.note_round_trip(rtt_s, is_idle=is_idle)

    def heard(self) -> None:
        """Note an answer of the peer."""
        self._heard.hear(time.monotonic())

    def reached(self) -> None:
        """Note a heartbeat of the peer over its own link; for any thread."""
        now_s = time.monotonic()
        if self._reached is None:
            self._reached = Silence(now_s)
        self._reached.hear(now_s)

    def raise_if_refused(self, error: CallError) -> None:
        """Raise the error that a final refusal means; return if a retry makes sense.

        Raises:
            IsthmusError: the peer refused.
        """
        refusal = refusal_of(error, self.peer)
        if refusal is not None and not self._outbox.is_over:
            raise refusal from error

    def note_refusal(self, error: CallError) -> None:
        """Suspect a peer that no longer knows this session: it is another process.

        Raises:
            IsthmusError: the peer refused for another reason.
        """
        refusal = refusal_of(error, self.peer)
        if isinstance(refusal, StaleGenerationError):
            self.suspect(str(refusal), is_gone=True)
        else:
            self.raise_if_refused(error)

    def suspect(self, why: str, *, is_gone: bool = False, for_good: bool = False) -> None:
        """Report that the peer cannot be reached; `for_good`: later answers do not count."""
        now_s = time.monotonic()
        with self._opinion:
            is_news = not self._is_suspected or (is_gone and not self._is_gone)
            self._is_suspected = True
            self._is_gone = is_gone = self._is_gone or is_gone
            self._has_ended = self._has_ended or for_good
            if not is_news and now_s < self._told_s + self._config.peer_lost_s:
                return
            self._told_s = now_s
        _log.warning("%s%s", why, " (it is gone)" if is_gone else "")
        self._on_suspect(is_gone, why)

    async def look_now(self) -> None:
        """Check at once whether the peer is gone."""
        if not self._outbox.is_over and await self.peer.refuses_connections():
            self.suspect(f"{self.peer} takes no connections any more", is_gone=True)

    def _clear(self) -> None:
        with self._opinion:
            if not self._is_suspected or self._has_ended:
                return
            self._is_suspected = self._is_gone = False
        _log.info("%s is reached again", self.peer)
        self._on_reached()

    async def _judge(self, error: CallError) -> None:
        """Suspect a peer that did not answer, if it has been silent too long."""
        silent_s = self._heard.lasts_s(time.monotonic())
        is_gone = await self.peer.refuses_connections()
        if is_gone or silent_s >= self._config.peer_lost_s:
            why = f"{self.peer} has not answered for {silent_s:.1f} s: {details(error)}"
            self.suspect(why, is_gone=is_gone)

    def _raise_if_lost(self, error: CallError, within_s: float) -> None:
        silent_s = self._heard.lasts_s(time.monotonic())
        if silent_s >= within_s:
            raise PeerLostError(
                f"{self.peer} has not answered for {silent_s:.1f} s: {details(error)}",
                self.peer.site,
            ) from error

    def _unreached(self) -> str:
        """Return why frames do not seem to cross in one direction; empty if they do."""
        stuck_s = self._outbox.stuck_s
        if stuck_s > self._config.peer_lost_s:
            return f"{self.peer} answers, but has taken no frame for {stuck_s:.1f} s"
        if self._reached is None:
            return ""
        since_s = self._reached.since_s  # other threads write it
        silent_s = time.monotonic() - since_s
        if silent_s <= self._config.peer_lost_s:
            return ""
        # Two checks must find the same silence: if both gateways are suspended repeatedly, each
        # check may find another one.
        was_doubted, self._doubted_s = self._doubted_s == since_s, since_s
        if not was_doubted:
            return ""
        return (
            f"{self.peer} answers, but has sent nothing by itself for {silent_s:.1f} s: it has "
            "lost its link to here"
        )

    def _begin_looks(self) -> Standstills:
        return Standstills(time.monotonic(), self._config.peer_lost_s)

    async def _wait(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        self._look(wait_s)

    def _look(self, longest_s: float) -> bool:
        """Restart the peer's deadline if this process was suspended; return whether it was.

        Args:
            longest_s: the longest intended wait since the previous check.
        """
        now_s = time.monotonic()
        stood_s = self._standstills.look(now_s, longest_s)
        if not stood_s:
            return False
        _log.warning("was suspended for %.1f s; restarting the deadline of %s", stood_s, self.peer)
        for silence in (self._heard, self._reached):
            if silence is not None:
                silence.begin_anew(now_s)
        return True

    @property
    def _patience_s(self) -> float:
        """Seconds that the peer may still be silent; above 0, for it is a timeout."""
        if self._is_suspected:
            return self._config.peer_lost_s
        silent_s = self._heard.lasts_s(time.monotonic())
        return max(self._config.peer_lost_s - silent_s, _PATIENCE_MIN_S)
