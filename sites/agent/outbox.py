"""What waits to be sent to the coordinator, in order and in bounded space.

Heartbeats overtake everything: a slow link must not look like a dead site. Measurements are
dropped, and counted, rather than let them hold up the gateway that produces them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from protos.control.v1.control_pb2 import AgentMessage, Digest, Heartbeat, Metric, MetricBatch
from protos.limits import CONTROL_MESSAGE_BYTES

BULK_BYTES = 4 << 20
"""Of metrics and digests that may wait."""
_OVERHEAD_BYTES = 8
"""A field's tag and length inside a batch."""
_HEADER_BYTES = 256
"""The rest of a batch: run and generation."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    message: AgentMessage
    bulk_bytes: int = 0


class Outbox:
    """Messages in, messages out. One task takes them."""

    def __init__(self) -> None:
        self._heartbeat: Heartbeat | None = None
        self._waiting: deque[_Waiting] = deque()
        self._bulk_bytes = 0
        self._num_dropped = 0
        self._ended = False
        self._filled = asyncio.Event()

    def put(self, message: AgentMessage) -> None:
        """Queue a message that must arrive: there are only a few of these in a run."""
        self._waiting.append(_Waiting(message))
        self._filled.set()

    def put_heartbeat(self, sequence: int) -> None:
        """Queue a heartbeat before everything else; one that still waits is replaced."""
        self._heartbeat = Heartbeat(sequence=sequence)
        self._filled.set()

    def put_metric(self, run_id: str, generation: int, metric: Metric) -> None:
        """Queue a metric; it travels in one batch with its neighbours."""
        size = metric.ByteSize() + _OVERHEAD_BYTES
        if not self._has_room(size):
            return
        last = self._waiting[-1] if self._waiting else None
        if last is None or not _takes(last, run_id, generation, size):
            batch = MetricBatch(run_id=run_id, generation=generation)
            last = _Waiting(AgentMessage(metrics=batch))
            self._waiting.append(last)
        last.message.metrics.metrics.append(metric)
        last.bulk_bytes += size
        self._bulk_bytes += size
        self._filled.set()

    def put_digest(self, digest: Digest) -> None:
        """Queue the hashes of a rank. A list of tensors that no message may hold is left out.

        The combined hash still tells whether ranks differ, only not in which tensor.
        """
        if digest.ByteSize() > CONTROL_MESSAGE_BYTES - _OVERHEAD_BYTES:
            del digest.tensors[:], digest.names[:]
        size = digest.ByteSize()
        if self._has_room(size):
            self._waiting.append(_Waiting(AgentMessage(digest=digest), size))
            self._bulk_bytes += size
            self._filled.set()

    def end(self) -> None:
        """Say that nothing follows what waits now."""
        self._ended = True
        self._filled.set()

    async def take(self) -> AgentMessage | None:
        """Return the next message, waiting for one; None after the last."""
        while not self._waiting:
            if self._ended:
                return None
            if self._heartbeat is not None:
                break
            self._filled.clear()
            await self._filled.wait()
        if self._heartbeat is not None:
            message, self._heartbeat = AgentMessage(heartbeat=self._heartbeat), None
            return message
        waiting = self._waiting.popleft()
        self._bulk_bytes -= waiting.bulk_bytes
        return waiting.message

    def _has_room(self, size: int) -> bool:
        if self._bulk_bytes + size <= BULK_BYTES:
            self._num_dropped = 0
            return True
        self._num_dropped += 1
        if self._num_dropped == 1:
            log.warning("metrics are dropped: the coordinator takes them too slowly")
        return False


def _takes(waiting: _Waiting, run_id: str, generation: int, size: int) -> bool:
    """Whether what waits is a batch of the same run with room for `size` bytes more."""
    batch = waiting.message.metrics
    return (
        waiting.message.HasField("metrics")
        and (batch.run_id, batch.generation) == (run_id, generation)
        # Counted, for asking the message each time would make a long batch quadratic.
        and waiting.bulk_bytes + size + _HEADER_BYTES <= CONTROL_MESSAGE_BYTES
    )
