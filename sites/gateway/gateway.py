"""One gateway: puts the parts together, and ends them in order."""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from protos.errors import IsthmusError, LocalProtocolError
from protos.frame import Frame
from protos.metrics import (
    BUSY_S,
    LINK,
    RAW_BYTES,
    RTT_S,
    SENT_BYTES,
    SENT_FRAMES,
    THROUGHPUT_BYTES_PER_S,
)
from sites.gateway.bucket_run import Post
from sites.gateway.config import GatewayConfig
from sites.gateway.exchange import Exchange
from sites.gateway.failure import Failure
from sites.gateway.greeting import Peer
from sites.gateway.link import Link
from sites.gateway.local import LocalServer
from sites.gateway.pool import Pool
from sites.gateway.server import ExchangeServer, Sender

_log = logging.getLogger(__name__)

_METRICS_EVERY_S: Final = 0.5
_FAREWELL_S: Final = 2.0
"""For telling peers that this gateway ends."""
_LAST_WORDS_S: Final = 0.25
"""For what ranks said just before the agent saw them end."""
_THREADS_MAX = 4

Write = Callable[[Mapping[str, Any]], None]


class Gateway:
    """A node's gateway. `start`, `connect`, then `wait_ended` and `close`."""

    def __init__(self, config: GatewayConfig, write: Write) -> None:
        """Start nothing.

        Args:
            config: from the agent.
            write: sends one message to the agent; may be called from any thread.
        """
        self._config = config
        self._write = write
        self._pool = Pool(max(2, min(_THREADS_MAX, os.cpu_count() or 2)))
        self._local = LocalServer(config, self)
        self._exchange = Exchange(
            config, self._pool, on_reduced=self._local.reduced, on_failure=self.fail
        )
        self._server = ExchangeServer(config, self)
        self._links: dict[Sender, Link] = {}
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._finished = threading.Event()
        """All local ranks have left: what happens to peers now is no failure of this site."""
        self._ended = threading.Event()
        self._connecting: threading.Thread | None = None

    @property
    def failure(self) -> Failure | None:
        """What ended the gateway, if it failed."""
        return self._failure

    def start(self) -> None:
        """Listen for ranks and peers, and say where."""
        self._pool.start()
        self._local.start()
        port = self._server.start()
        self._write({"op": "listening", "host": self._config.bind_host, "port": port})

    def connect(self, peers: tuple[Peer, ...]) -> None:
        """Begin to dial every gateway of the neighbouring sites; the agent is told when all answer.

        Raises:
            LocalProtocolError: a gateway is missing from `peers`, or this was called before.
        """
        if self._connecting is not None:
            raise LocalProtocolError("stdin: connect came twice")
        config = self._config
        by_gateway = {(peer.site, peer.node): peer for peer in peers}
        for figures in config.links:
            index = config.sites.index(figures.site)
            for node in range(config.nodes_per_site[index]):
                peer = by_gateway.get((figures.site, node))
                if peer is None:
                    raise LocalProtocolError(
                        f"stdin: connect: no address of site {figures.site} node {node}"
                    )
                self._links[index, node] = Link(
                    config, figures, peer, on_failure=self.fail, on_progress=self._exchange.pump
                )
        self._exchange.connect(self._links)
        self._connecting = threading.Thread(target=self._open_links, name="connect", daemon=True)
        self._connecting.start()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for a failure or `stop`; return whether it came."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """The agent wants no more: end."""
        self._ended.set()

    def close(self) -> None:
        """Take leave of ranks, peers and agent, and end every thread. Idempotent."""
        self._ended.set()
        farewell = self._failure
        if farewell is not None:
            self._write(farewell.to_agent())
        elif not self._finished.wait(_LAST_WORDS_S):
            farewell = Failure(
                code="PEER_LOST", message=f"site {self._config.site} was stopped", collateral=True
            )
        if farewell is not None:
            self._local.fail_all(farewell)
        else:
            self._drain()
        _side_by_side(
            [functools.partial(self._leave, link, farewell) for link in self._links.values()]
        )
        if self._links:
            self._report_links()
        self._exchange.close()
        for link in self._links.values():
            link.close()
        self._server.close()
        self._pool.close()
        self._local.close()

    # ---------------------------------------------------------------- what others report

    def receive(self, sender: Sender, frame: Frame) -> None:
        """Take a peer's frame over."""
        self._exchange.receive(sender, frame)

    def peer_left(self, sender: Sender) -> None:
        """A peer has finished."""
        link = self._links.get(sender)
        if link is not None:
            link.peer_left()

    def joined(self, ranks: list[int]) -> None:
        """All local ranks are there."""
        self._write({"op": "joined", "ranks": ranks})

    def post(self, rank: int, post: Post) -> None:
        """A rank's part of a bucket is there."""
        self._exchange.post(rank, post)

    def passed(self, message: dict[str, Any]) -> None:
        """A rank has something for the agent."""
        self._write(message)

    def left(self) -> None:
        """All local ranks have left."""
        self._finished.set()

    def fail(self, failure: Failure) -> None:
        """Keep the first failure, and end."""
        with self._lock:
            if self._failure is not None or self._finished.is_set() or self._ended.is_set():
                _log.info("after the end: %s: %s", failure.code, failure.message)
                return
            self._failure = failure
        _log.error("%s: %s", failure.code, failure.message)
        self._ended.set()

    # ---------------------------------------------------------------- small things

    def _drain(self) -> None:
        """Have everything acknowledged that peers still need."""
        deadline_s = time.monotonic() + self._config.peer_lost_s
        for link in self._links.values():
            if not link.drain(deadline_s):
                _log.warning("%s has not acknowledged everything", link.peer)

    def _open_links(self) -> None:
        """Say Hello to all; once all have answered, report what the links carry until the end."""
        _side_by_side([functools.partial(self._open, link) for link in self._links.values()])
        if self._ended.is_set():
            return
        self._write({"op": "connected"})
        while not self._ended.wait(_METRICS_EVERY_S):
            self._report_links()

    def _open(self, link: Link) -> None:
        try:
            link.open()
        except IsthmusError as error:
            self.fail(Failure.of(error, link.peer.site))

    def _leave(self, link: Link, failure: Failure | None) -> None:
        link.leave(failure, _FAREWELL_S)

    def _report_links(self) -> None:
        """Write the totals of each directed link: of all gateways of the peer's site together."""
        for figures in self._config.links:
            index = self._config.sites.index(figures.site)
            totals = [link.totals() for (site, _), link in self._links.items() if site == index]
            sent_bytes = sum(each.sent_bytes for each in totals)
            busy_s = max(each.busy_s for each in totals)
            values: dict[str, float] = {
                SENT_BYTES: sent_bytes,
                RAW_BYTES: sum(each.raw_bytes for each in totals),
                SENT_FRAMES: sum(each.sent_frames for each in totals),
                BUSY_S: busy_s,
            }
            if busy_s > 0:
                values[THROUGHPUT_BYTES_PER_S] = sent_bytes / busy_s
            rtt_s = min(each.rtt_s for each in totals)
            if math.isfinite(rtt_s):
                values[RTT_S] = rtt_s
            self._write(
                {
                    "op": "metric",
                    "kind": LINK,
                    "rank": -1,
                    "step": max(self._exchange.round, 0),
                    "values": values,
                    "labels": {
                        "source": self._config.site,
                        "target": figures.site,
                        "node": str(self._config.node),
                    },
                }
            )


def _side_by_side(calls: list[Callable[[], None]]) -> None:
    """Make blocking calls that report their own errors, each on a thread; return after all."""
    threads = [
        threading.Thread(target=call, name=f"peer-{index}", daemon=True)
        for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
