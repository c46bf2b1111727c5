"""Takes over what peers send: counted, checked against the bucket's plan, and given to its chunk.

Whoever calls holds the executor's lock.
"""

from __future__ import annotations

from protos.errors import RemoteProtocolError
from protos.frame import HEADER_BYTES, Frame, Kind
from sites.gateway.config import GatewayConfig
from sites.gateway.links.peer_links import Link
from sites.gateway.links.peer_server import Sender
from sites.gateway.reduction.bucket import Arrival, BucketRun, Chunk
from sites.gateway.reduction.chunk_reduction import Received
from sites.gateway.reduction.credit import FRAME_BYTES, Held
from sites.gateway.reduction.under_way import UnderWay


class Intake:
    """Of one gateway."""

    def __init__(self, config: GatewayConfig, under_way: UnderWay, held: Held) -> None:
        """Take nothing yet.

        Args:
            config: this gateway's.
            under_way: the buckets, opened by its ranks.
            held: counts what is kept until it can be summed.
        """
        self._config = config
        self._under_way = under_way
        self._held = held
        self._last_arrival_s: dict[Sender, float] = {}

    def is_repetition(self, sender: Sender, frame: Frame) -> bool:
        """Whether a frame changes nothing any more: its connection broke before it was told so."""
        key = frame.key
        run = self._under_way.find((key.round, key.bucket))
        if run is None or run.reduction is None:
            if not self._under_way.rounds.is_ahead((key.round, key.bucket)):
                return True
        else:
            chunk = run.chunks.get(key.chunk)
            if chunk is not None and (
                chunk.is_finished or (chunk.is_summed and key.kind is Kind.CONTRIBUTION)
            ):
                return True
        return self._held.has(sender, (key.round, key.bucket, key.chunk))

    def take_over(
        self, sender: Sender, frame: Frame, now_s: float, link: Link | None
    ) -> tuple[BucketRun, Chunk] | None:
        """Deliver a frame, or keep it until a local rank posts its bucket; return what to work on.

        Args:
            sender: who sent it.
            frame: no repetition.
            now_s: when it came.
            link: to its sender, once there is one.

        Raises:
            IsthmusError: the peer may not send this.
        """
        key = frame.key.round, frame.key.bucket
        run = self._under_way.expect(key)
        self._note_arrival(run, sender, frame, now_s, link)
        ready = None
        if run.reduction is None:
            run.early.append((sender, frame))
        else:
            chunk = self.accept(run, sender, frame)
            ready = None if chunk is None else (run, chunk)
        order = (*key, frame.key.chunk)
        self._held.keep(sender, order, FRAME_BYTES + len(frame.payload))
        return ready

    def accept(self, run: BucketRun, sender: Sender, frame: Frame) -> Chunk | None:
        """Check and deliver a frame of an opened bucket; return the chunk if it is to be worked on.

        Raises:
            IsthmusError: the bucket's plan has no such frame.
        """
        assert run.reduction is not None
        run.reduction.check(sender[0], frame)
        config = self._config
        rank = run.reduction.bucket.grid.owner(config.site_index, frame.key.chunk)
        if rank // config.ranks_per_node[config.site_index] != config.node:
            raise RemoteProtocolError(
                f"chunk {frame.key.chunk} belongs to rank {rank}, not to this node"
            )
        chunk = self._under_way.chunk(run, frame.key.chunk)
        return chunk if chunk.deliver(Received(sender[0], frame)) else None

    def _note_arrival(
        self, run: BucketRun, sender: Sender, frame: Frame, now_s: float, link: Link | None
    ) -> None:
        previous_s = self._last_arrival_s.get(sender, 0.0)
        self._last_arrival_s[sender] = now_s
        if sender not in run.arrivals and link is not None:
            run.arrivals[sender] = Arrival(
                now_s,
                previous_s,
                HEADER_BYTES + len(frame.payload),
                link.num_channels,
                frame.key.kind is Kind.RESULT,
                link.rtt_s,
                link.bytes_per_s,
            )
