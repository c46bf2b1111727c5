"""Watches a peer gateway: greets it until it answers, and then asks from time to time.

That happens on a channel of its own, where no chunk is in the way. Silence is measured by these
answers and by acknowledgements; and the answers tell the link's round trip.

The peer asks, too. If it answers, but has itself sent nothing for as long, its own link to this
gateway is down. It is suspected as well: the frames that it owes will not come. And so it is if
it answers, and takes no frame: connections are given up one after another (`streams.py`).

A peer that is silent for too long is *suspected*, and one that refuses connections, or has said
that it ends, is suspected of being gone. That is an opinion, and may change: the watch goes on.

A process that stood still has heard nobody meanwhile. It gives the peer time anew, for that may
have stood still with it; a greeting that was on its way then is asked again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import grpc

from isthmus.protos.errors import PeerLostError, StaleGenerationError
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.inbound_proxy import InboundProxy
from isthmus.sites.gateway.links.send_queue import Outbox
from isthmus.sites.gateway.links.transport import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    Peer,
    details,
    refusal_of,
    say_hello,
)
from isthmus.sites.silence import Silence, Standstills

_log = logging.getLogger(__name__)

_PATIENCE_MIN_S = 0.05

Judge = Callable[[bool, str], None]
"""Told that a peer is suspected: whether it is gone, and why."""


class PeerWatch:
    """Watches one peer. `greet`, then `run` on a thread."""

    def __init__(
        self,
        config: GatewayConfig,
        peer: Peer | InboundProxy,
        outbox: Outbox,
        *,
        on_suspect: Judge = lambda *_: None,
        on_reached: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_suspect` is told when a suspicion begins or grows, and again from time to time.

        `on_reached` is told when it has ended. Both from any thread.
        """
        self.peer = peer
        self._on_suspect, self._on_reached = on_suspect, on_reached
        self._opinion = threading.Lock()
        """Guards what this side thinks of the peer."""
        self._is_suspected = False
        self._is_gone = False
        self._has_ended = False
        """It has said so itself: nothing that it answers meanwhile counts."""
        self._told_s = 0.0
        self.session = ""
        """What the peer calls this side; empty until it has answered."""
        self._config = config
        self._outbox = outbox
        self._heard = Silence(time.monotonic())
        self._reached: Silence | None = None
        """The peer's silence since it last said something by itself; None: it has never."""
        self._doubted_s: float | None = None
        """Where the look before found the peer silent for too long: since when it was silent."""
        self._standstills = self._begin_looks()

    def greet(self, within_s: float | None = None) -> None:
        """Greet the peer until it answers; without `within_s` it is only suspected meanwhile.

        Raises:
            ConfigMismatchError: the peer refused: another configuration or protocol.
            StaleGenerationError: the peer refused: another run or generation.
            PeerLostError: no answer within `within_s`, or a third of `peer_lost_s` more; within as
                long again if this process stood still.
        """
        self._standstills = self._begin_looks()
        self.heard()
        backoff_s = BACKOFF_FIRST_S
        while not self.session:
            try:
                with self.peer.channel(self._config) as channel:
                    self.hello(channel, self._config.peer_lost_s / 3)
                    # Again, on a connection that is there: this one tells the round trip.
                    self.hello(channel, self._config.peer_lost_s / 3)
            except grpc.RpcError as error:
                self.raise_if_refused(error)
                if within_s is None:
                    self._judge(error)
                else:
                    self._raise_if_lost(error, within_s)
                if self._is_closed_after(backoff_s):
                    raise PeerLostError("the gateway was stopped", self.peer.site) from error
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def run(self) -> None:
        """Ask from time to time whether the peer lives, until the link is over.

        It is suspected when it has been silent for `peer_lost_s`, or has sent nothing by itself for
        that long and two looks: it may have to be read yet. As long again if this process stood
        still.

        Raises:
            ConfigMismatchError: the peer refused: another configuration or protocol.
        """
        self._standstills = self._begin_looks()
        interval_s = min(self._config.keepalive_time_s, self._config.peer_lost_s / 5)
        channel = self.peer.channel(self._config)
        try:
            while (
                not self._is_closed_after(min(interval_s, self._patience_s))
                and not self._outbox.is_over
            ):
                unreached = self._unreached()
                if unreached:
                    self.suspect(unreached)
                try:
                    self.hello(channel, min(self._config.peer_lost_s / 3, self._patience_s))
                except grpc.RpcError as error:
                    if self._outbox.is_over:
                        return
                    self.note_refusal(error)
                    self._judge(error)
                    channel.close()
                    channel = self.peer.channel(self._config)
                else:
                    if not unreached:
                        self._clear()
        finally:
            channel.close()

    def hello(self, channel: grpc.Channel, timeout_s: float) -> None:
        """Send Hello once, and note what the answer tells.

        Raises:
            grpc.RpcError: the peer refused, or did not answer.
        """
        is_idle = self._outbox.is_empty
        begun_s = time.monotonic()
        try:
            session = say_hello(channel, self._config, timeout_s).session
        finally:
            stood_still = self._look(timeout_s)
        self.session = self.session or session
        if session != self.session:
            self.suspect(f"{self.peer} is another process by now", is_gone=True, for_good=True)
        self.heard()
        if not stood_still:
            self._outbox.note_round_trip(time.monotonic() - begun_s, is_idle=is_idle)

    def heard(self) -> None:
        """The peer has answered something."""
        self._heard.hear(time.monotonic())

    def reached(self) -> None:
        """The peer has said something by itself, over its own link; for any thread."""
        now_s = time.monotonic()
        if self._reached is None:
            self._reached = Silence(now_s)
        self._reached.hear(now_s)

    def raise_if_refused(self, error: grpc.RpcError) -> None:
        """Raise what a final answer means; anything else may be tried again.

        Raises:
            IsthmusError: the peer refused.
        """
        refusal = refusal_of(error, self.peer)
        if refusal is not None and not self._outbox.is_over:
            raise refusal from error

    def note_refusal(self, error: grpc.RpcError) -> None:
        """Suspect who knows nothing of this session any more: it is another process.

        Raises:
            IsthmusError: the peer refused for another reason.
        """
        refusal = refusal_of(error, self.peer)
        if isinstance(refusal, StaleGenerationError):
            self.suspect(str(refusal), is_gone=True)
        else:
            self.raise_if_refused(error)

    def suspect(self, why: str, *, is_gone: bool = False, for_good: bool = False) -> None:
        """Tell that the peer cannot be reached; `for_good`: whatever it answers."""
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

    def look_now(self) -> None:
        """A connection broke: see at once whether the peer is gone. Blocks for a round trip."""
        if not self._outbox.is_over and self._refuses_connections():
            self.suspect(f"{self.peer} takes no connections any more", is_gone=True)

    def _clear(self) -> None:
        with self._opinion:
            if not self._is_suspected or self._has_ended:
                return
            self._is_suspected = self._is_gone = False
        _log.info("%s is reached again", self.peer)
        self._on_reached()

    def _judge(self, error: grpc.RpcError) -> None:
        """Suspect a peer that did not answer, if it is time to."""
        silent_s = self._heard.lasts_s(time.monotonic())
        is_gone = self._refuses_connections()
        if is_gone or silent_s >= self._config.peer_lost_s:
            why = f"{self.peer} has not answered for {silent_s:.1f} s: {details(error)}"
            self.suspect(why, is_gone=is_gone)

    def _refuses_connections(self) -> bool:
        return self.peer.refuses_connections()

    def _raise_if_lost(self, error: grpc.RpcError, within_s: float) -> None:
        silent_s = self._heard.lasts_s(time.monotonic())
        if silent_s >= within_s:
            raise PeerLostError(
                f"{self.peer} has not answered for {silent_s:.1f} s: {details(error)}",
                self.peer.site,
            ) from error

    def _unreached(self) -> str:
        """Return why frames do not seem to cross, one way or the other; nothing if they do."""
        stuck_s = self._outbox.stuck_s
        if stuck_s > self._config.peer_lost_s:
            return f"{self.peer} answers, but has taken no frame for {stuck_s:.1f} s"
        if self._reached is None:
            return ""
        since_s = self._reached.since_s  # other threads write it
        silent_s = time.monotonic() - since_s
        if silent_s <= self._config.peer_lost_s:
            return ""
        # It takes two looks at the same silence: if both gateways stand still again and again, each
        # look may find another silence.
        was_doubted, self._doubted_s = self._doubted_s == since_s, since_s
        if not was_doubted:
            return ""
        return (
            f"{self.peer} answers, but has sent nothing by itself for {silent_s:.1f} s: it has "
            "lost its link to here"
        )

    def _begin_looks(self) -> Standstills:
        return Standstills(time.monotonic(), self._config.peer_lost_s)

    def _is_closed_after(self, wait_s: float) -> bool:
        """Wait; return early, and whether, if the link is closed."""
        is_closed = self._outbox.closed.wait(wait_s)
        self._look(wait_s)
        return is_closed

    def _look(self, longest_s: float) -> bool:
        """Give the peer time anew if this process stood still; return whether it did.

        Args:
            longest_s: how long this thread had meant to wait since the look before, at most.
        """
        now_s = time.monotonic()
        stood_s = self._standstills.look(now_s, longest_s)
        if not stood_s:
            return False
        _log.warning("stood still for %.1f s; %s is given time anew", stood_s, self.peer)
        for silence in (self._heard, self._reached):
            if silence is not None:
                silence.begin_anew(now_s)
        return True

    @property
    def _patience_s(self) -> float:
        """How much longer the peer may be silent; never quite nothing, for it is waited for."""
        if self._is_suspected:
            return self._config.peer_lost_s
        silent_s = self._heard.lasts_s(time.monotonic())
        return max(self._config.peer_lost_s - silent_s, _PATIENCE_MIN_S)
