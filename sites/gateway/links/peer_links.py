"""The links of one gateway: those that its plan needs, and those of plans to come.

A link is made when a plan first needs it. One that is lost when no plan needs it any more is only
closed, and made again if another plan does.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from protos.errors import IsthmusError, LocalProtocolError
from sites.gateway.config import GatewayConfig
from sites.gateway.failure import Failure
from sites.gateway.links.greeting import Peer
from sites.gateway.links.link import Link
from sites.gateway.links.server import Sender

_log = logging.getLogger(__name__)


class PeerLinks:
    """`meet` the peers, then `add` sites. All methods may be called from any thread."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        on_change: Callable[[Mapping[Sender, Link]], None],
        on_failure: Callable[[Failure], None],
        on_progress: Callable[[], None],
        needs: Callable[[int], bool],
    ) -> None:
        """Connect nothing yet.

        Args:
            config: this gateway's.
            on_change: told of all links whenever some are added or dropped; what it gets stays as
                it is.
            on_failure: told when a link is lost that is needed.
            on_progress: told when a frame has left a queue; must not block.
            needs: whether the link to a site, by index, is of use to a plan.
        """
        self._config = config
        self._on_change = on_change
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._needs = needs
        self._peers: Mapping[Sender, Peer] = {}
        self._lock = threading.Lock()
        self._links: dict[Sender, Link] = {}
        self._is_closed = False

    @property
    def all(self) -> Mapping[Sender, Link]:
        """Every link that there is now."""
        return self._links

    def to(self, site: str) -> list[Link]:
        """Return the links to a site's gateways."""
        index = self._config.sites.index(site)
        return [link for (other, _), link in self._links.items() if other == index]

    def meet(self, peers: Iterable[Peer]) -> None:
        """Take the addresses of all gateways that this one may have to dial.

        Raises:
            LocalProtocolError: one is missing, or this was called before.
        """
        if self._peers:
            raise LocalProtocolError("stdin: connect came twice")
        config = self._config
        known = {(peer.site, peer.node): peer for peer in peers}
        met: dict[Sender, Peer] = {}
        for figures in config.links:
            index = config.sites.index(figures.site)
            for node in range(config.nodes_per_site[index]):
                if (figures.site, node) not in known:
                    raise LocalProtocolError(
                        f"stdin: connect: no address of site {figures.site} node {node}"
                    )
                met[index, node] = known[figures.site, node]
        self._peers = met

    def add(self, sites: Iterable[int]) -> dict[Sender, Link]:
        """Make and return the links to some sites that there are not yet; the caller opens them.

        Of those that there are, the peers may just be making their own again.

        Raises:
            LocalProtocolError: this site has no link to one of them.
        """
        wanted = set(sites)
        unknown = wanted - {site for site, _ in self._peers}
        if unknown:
            names = ", ".join(self._config.sites[site] for site in sorted(unknown))
            raise LocalProtocolError(f"site {self._config.site} has no links with {names}")
        figures = {each.site: each for each in self._config.links}
        with self._lock:
            if self._is_closed:
                raise LocalProtocolError("this gateway is stopping")
            for sender, link in self._links.items():
                if sender[0] in wanted:
                    link.wanted_again()
            added = {
                sender: Link(
                    self._config,
                    figures[peer.site],
                    peer,
                    on_failure=functools.partial(self._failed, sender),
                    on_progress=self._on_progress,
                )
                for sender, peer in self._peers.items()
                if sender[0] in wanted and sender not in self._links
            }
            self._links = {**self._links, **added}
            self._on_change(self._links)
        return added

    def open(self, links: Iterable[Link], within_s: float) -> list[Failure]:
        """Say Hello over new links, side by side; return what went wrong, in the order of time.

        Args:
            links: from `add`.
            within_s: by when peers have to answer.
        """
        failures: list[Failure] = []

        def open_one(link: Link) -> None:
            try:
                link.open(within_s)
            except IsthmusError as error:
                failures.append(Failure.of(error, link.peer.site))
            except Exception as error:  # noqa: BLE001 - a thread's root; it would pass for open
                _log.exception("the link to %s was not opened", link.peer)
                failures.append(Failure.of(error))

        side_by_side([functools.partial(open_one, link) for link in links])
        return failures

    def drop(self, senders: Iterable[Sender]) -> None:
        """Close links as if they had never been made."""
        with self._lock:
            dropped = self._forget(senders)
        self._end(dropped)

    def missing(self, sites: Iterable[int]) -> list[str]:
        """Return the names of those sites to which there are no links."""
        with self._lock:
            there = {site for site, _ in self._links}
        return [self._config.sites[site] for site in sites if site not in there]

    def close(self) -> None:
        """End all links. Frames that were not acknowledged are dropped."""
        with self._lock:
            self._is_closed = True
            links = self._links
        for link in links.values():
            link.close()

    def _failed(self, sender: Sender, failure: Failure) -> None:
        with self._lock:  # so that who has a plan kept that needs it finds it gone, if it goes
            is_needed = self._needs(sender[0])
            dropped = [] if is_needed else self._forget([sender])
        if is_needed:
            self._on_failure(failure)
            return
        _log.warning("%s, whom no plan needs any more: %s", self._peers[sender], failure.message)
        self._end(dropped)

    def _forget(self, senders: Iterable[Sender]) -> list[Link]:
        """Take links out and return them; the lock is held."""
        forgotten = set(senders)
        links = [link for sender, link in self._links.items() if sender in forgotten]
        self._links = {
            sender: link for sender, link in self._links.items() if sender not in forgotten
        }
        self._on_change(self._links)
        return links

    def _end(self, links: Iterable[Link]) -> None:
        for link in links:
            link.close()
        self._on_progress()  # what waited for room on one of them need not any more


def side_by_side(calls: list[Callable[[], None]]) -> None:
    """Make blocking calls that report their own errors, each on a thread; return after all."""
    threads = [
        threading.Thread(target=call, name=f"peer-{index}", daemon=True)
        for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
