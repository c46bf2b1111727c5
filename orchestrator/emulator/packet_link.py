"""The packets of a TUN device, and the directed link that carries them.

A device with a virtio_net_hdr delivers frames, each standing for one or more IP packets. The kernel
leaves segmentation to the device (GSO), so one read may return up to 64 KiB of a TCP stream under
one header. On a wire it would be `num_wire` packets of an MTU each with their headers repeated;
that is what a link counts, queues and loses. When only some of them survive, `part` makes a frame
that stands for just those, as if the kernel had cut them out itself.

Checksums are not computed: NEEDS_CSUM asks the receiving kernel to trust (or, if it forwards, to
fill in) what has never left this machine, so TCP's field holds only the pseudo-header's sum.

**The link** is pure arithmetic; the time is an argument. A packet waits in a queue, is transmitted
at the link's rate, may be lost, and arrives one delay later. The queue is drop-tail and bounded in
bytes of IP packets: what finds no room is dropped, and that is how TCP learns the rate. What has
begun its transmission no longer counts.

**Frames of many packets.** A frame is transmitted in pieces of at most `PIECE_S` of transmission
time (at least one packet). A piece is transmitted without a break and arrives as one frame when its
last byte would, so a packet arrives up to `PIECE_S` later than it would alone, never earlier. A
lost packet ends its piece early; what follows it is a frame of its own. When a piece finds room for
only some of its packets, the others are dropped, and so are the frame's later pieces.

**Rates and delays may change at any time.** What is on the transmitter finishes at the old rate;
what waits goes out at the new one. Nothing overtakes, whatever the jitter and the delays.
"""

from __future__ import annotations

import math
import random
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.orchestrator.emulator.link_shape import LinkShape, LossDeck
from isthmus.topology.spec.tcp_constants import MTU_BYTES

VNET_BYTES = 10
MAX_FRAME_BYTES = VNET_BYTES + (1 << 16)
Part = tuple[bytes | memoryview, ...]
"""The buffers of a frame, to be written to a TUN device at once."""

_VNET = struct.Struct("=BBHHHH")  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
_GSO_NONE = 0
_GSO_TCPV4 = 1
_IPPROTO_TCP = 6
_MIN_IP_BYTES = 20
_MIN_TCP_BYTES = 20
_IP_PROTOCOL_AT = VNET_BYTES + 9
_TARGET = struct.Struct("!I")
_TARGET_AT = VNET_BYTES + 16
_IP_ID_AT = 4
_IP_CHECKSUM_AT = 10
_TCP_SEQUENCE_AT = 4
_TCP_OFFSET_AT = 12
_TCP_FLAGS_AT = 13
_TCP_CHECKSUM_AT = 16
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


class Packet:
    """One frame of a TUN device.

    Attributes:
        frame: The virtio_net_hdr and the IPv4 packet.
        target: The destination's address as a number.
        num_wire: Number of IP packets that the frame stands for.
        header_bytes: IP and TCP headers, repeated by each packet; 0 for a single packet.
        segment_bytes: Payload of each packet but the last.
        num_bytes: Size of all these packets together.
    """

    __slots__ = ("frame", "header_bytes", "num_bytes", "num_wire", "segment_bytes", "target")

    def __init__(self, frame: bytes, header_bytes: int, segment_bytes: int) -> None:
        self.frame = frame
        (self.target,) = _TARGET.unpack_from(frame, _TARGET_AT)
        self.header_bytes = header_bytes
        self.segment_bytes = segment_bytes
        payload_bytes = len(frame) - VNET_BYTES - header_bytes
        self.num_wire = -(-payload_bytes // segment_bytes)
        self.num_bytes = payload_bytes + self.num_wire * header_bytes

    def bytes_of(self, first: int, last: int) -> int:
        """Return the size of the wire packets from `first` to before `last`."""
        if last == self.num_wire:
            return self.num_bytes - first * (self.segment_bytes + self.header_bytes)
        return (last - first) * (self.segment_bytes + self.header_bytes)

    def num_fitting(self, first: int, room_bytes: int) -> int:
        """Return the number of wire packets from `first` on that fit into `room_bytes`."""
        if self.bytes_of(first, self.num_wire) <= room_bytes:
            return self.num_wire - first
        fitting = max(0, room_bytes) // (self.segment_bytes + self.header_bytes)
        return min(fitting, self.num_wire - first - 1)

    def part(self, first: int, last: int) -> Part:
        """Return a frame for the wire packets from `first` to before `last`."""
        if first == 0 and last == self.num_wire:
            return (self.frame,)
        start = VNET_BYTES + self.header_bytes
        payload = memoryview(self.frame)[
            start + first * self.segment_bytes : start + last * self.segment_bytes
        ]
        return (self._headers(first, last, len(payload)), payload)

    def _headers(self, first: int, last: int, payload_bytes: int) -> bytes:
        headers = bytearray(self.frame[: VNET_BYTES + self.header_bytes])
        ip = VNET_BYTES
        tcp = ip + (headers[ip] & 0x0F) * 4
        flags, _, _, _, csum_start, csum_offset = _VNET.unpack_from(headers)
        one = last - first == 1
        # hdr_len as read may cover payload too; one longer than the frame would be refused.
        _VNET.pack_into(
            headers,
            0,
            flags,
            _GSO_NONE if one else _GSO_TCPV4,
            self.header_bytes,
            0 if one else self.segment_bytes,
            csum_start,
            csum_offset,
        )
        struct.pack_into("!H", headers, ip + 2, self.header_bytes + payload_bytes)
        _add(headers, ip + _IP_ID_AT, "!H", first)
        struct.pack_into("!H", headers, ip + _IP_CHECKSUM_AT, 0)
        struct.pack_into("!H", headers, ip + _IP_CHECKSUM_AT, 0xFFFF ^ _sum(headers[ip:tcp]))
        _add(headers, tcp + _TCP_SEQUENCE_AT, "!I", first * self.segment_bytes)
        if last != self.num_wire:
            headers[tcp + _TCP_FLAGS_AT] &= ~(_FIN | _PSH) & 0xFF
        if first != 0:
            headers[tcp + _TCP_FLAGS_AT] &= ~_CWR & 0xFF
        tcp_bytes = len(headers) - tcp + payload_bytes
        pseudo = bytes(headers[ip + 12 : ip + 20]) + struct.pack("!HH", _IPPROTO_TCP, tcp_bytes)
        struct.pack_into("!H", headers, tcp + _TCP_CHECKSUM_AT, _sum(pseudo))
        return bytes(headers)


def parse(frame: bytes) -> Packet | None:
    """Return the packet of a frame; None: not IPv4, or malformed.

    A site's processes may write arbitrary bytes to their device, so all is checked.
    """
    if len(frame) < VNET_BYTES + _MIN_IP_BYTES or frame[VNET_BYTES] >> 4 != 4:
        return None
    gso_type = frame[1]
    if gso_type == _GSO_NONE:
        return Packet(frame, 0, len(frame) - VNET_BYTES)
    _, _, _, segment_bytes, _, _ = _VNET.unpack_from(frame)
    ip_bytes = (frame[VNET_BYTES] & 0x0F) * 4
    tcp = VNET_BYTES + ip_bytes
    if gso_type != _GSO_TCPV4 or ip_bytes < _MIN_IP_BYTES or len(frame) <= tcp + _TCP_OFFSET_AT:
        return None
    tcp_bytes = (frame[tcp + _TCP_OFFSET_AT] >> 4) * 4
    if frame[_IP_PROTOCOL_AT] != _IPPROTO_TCP or tcp_bytes < _MIN_TCP_BYTES:
        return None
    if segment_bytes == 0 or len(frame) <= tcp + tcp_bytes:
        return None
    return Packet(frame, ip_bytes + tcp_bytes, segment_bytes)


def _add(headers: bytearray, at: int, kind: str, increment: int) -> None:
    """Add to a big-endian field, which wraps around."""
    (value,) = struct.unpack_from(kind, headers, at)
    struct.pack_into(kind, headers, at, (value + increment) % (1 << 8 * struct.calcsize(kind)))


def _sum(data: bytes | bytearray) -> int:
    """Return the internet checksum's sum of an even number of bytes, folded, not complemented."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return (total & 0xFFFF) + (total >> 16)


PIECE_S = 0.001
MIN_QUEUE_BYTES = 64 * MTU_BYTES
"""Smallest queue: one and a half frames of the kernel, however narrow the link is."""
MIN_QUEUE_S = 0.005
"""Smallest queue in seconds, for bursts after this machine was busy: on a short link a smaller
queue would show TCP congestion that the link does not have."""


@dataclass(slots=True)
class LinkCounters:
    """Totals of a link since the start. Bytes are those of IP packets."""

    sent_bytes: int = 0
    """Bytes sent by the source, lost ones included."""
    delivered_bytes: int = 0
    dropped_packets: int = 0
    """Packets that found the queue full."""
    lost_packets: int = 0
    """Packets lost by chance, or because the link was cut."""


class PacketLink:
    """The queue, the transmitter and the delay line of one directed link.

    Losses and jitter depend only on the seed and the sites' names.
    """

    def __init__(self, shape: LinkShape, seed: int) -> None:
        name = f"{seed}/{shape.source}/{shape.target}"
        self._jitter = random.Random(f"{name}/jitter")  # noqa: S311 - not a secret
        self._loss = random.Random(f"{name}/loss")  # noqa: S311
        self._queue: deque[tuple[float, Packet, int, int]] = deque()  # came at, first, last
        self._queued_bytes = 0
        self._line: deque[tuple[float, Packet, int, int]] = deque()  # due at, first, last
        self._free_at_s = -math.inf
        self._last_due_s = -math.inf
        self._is_cut = False
        self.counters = LinkCounters()
        self._take(shape)

    def queued_bytes(self, now_s: float) -> int:
        """Return the bytes that wait for the transmitter."""
        self._advance(now_s)
        return self._queued_bytes

    def due_s(self) -> float:
        """Return the time of the next delivery; infinity on an idle link."""
        if self._line:
            return self._line[0][0]
        if self._queue:  # when the head's transmission begins and losses and jitter are drawn
            return max(self._queue[0][0], self._free_at_s)
        return math.inf

    def offer(self, packet: Packet, now_s: float) -> None:
        """Accept a frame from the source at `now_s`, or the packets that fit the queue."""
        self._advance(now_s)
        self.counters.sent_bytes += packet.num_bytes
        if self._is_cut:
            self.counters.lost_packets += packet.num_wire
            return
        num_wire = packet.num_wire
        step = max(1, int(self._piece_bytes // (packet.segment_bytes + packet.header_bytes)))
        first = 0
        while first < num_wire:
            last = min(num_wire, first + step)
            if not self._queue and self._free_at_s <= now_s:
                self._transmit(now_s, packet, first, last)
            else:
                room_bytes = self._room_bytes - self._queued_bytes
                num_fitting = packet.num_fitting(first, room_bytes)
                if num_fitting < last - first:
                    self._enqueue(now_s, packet, first, first + num_fitting)
                    self.counters.dropped_packets += num_wire - first - num_fitting
                    return
                self._enqueue(now_s, packet, first, last)
            first = last

    def delivered(self, now_s: float) -> Iterator[Part]:
        """Yield the frames that have arrived by `now_s`, in order."""
        self._advance(now_s)
        line, counters = self._line, self.counters
        while line and line[0][0] <= now_s:
            _, packet, first, last = line.popleft()
            counters.delivered_bytes += packet.bytes_of(first, last)
            yield packet.part(first, last)

    def reshape(self, shape: LinkShape, now_s: float) -> None:
        """Change the figures from `now_s` on, for packets not in transmission yet."""
        self._advance(now_s)
        self._take(shape)

    def cut(self, now_s: float) -> None:
        """Drop all packets in flight, and all that come until `mend`."""
        self._advance(now_s)
        self._is_cut = True
        for waiting in (self._queue, self._line):
            self.counters.lost_packets += sum(last - first for _, _, first, last in waiting)
            waiting.clear()
        self._queued_bytes = 0
        # No packet is left that the next one would have to wait for, or could overtake.
        self._free_at_s = self._last_due_s = -math.inf

    def mend(self) -> None:
        """End a cut."""
        self._is_cut = False

    def _take(self, shape: LinkShape) -> None:
        self._shape = shape
        self._deck = LossDeck(shape.loss, self._loss)
        self._piece_bytes = PIECE_S * shape.bytes_per_s
        self._room_bytes = shape.queue_bytes or default_queue_bytes(shape)

    def _enqueue(self, now_s: float, packet: Packet, first: int, last: int) -> None:
        if first < last:
            self._queue.append((now_s, packet, first, last))
            self._queued_bytes += packet.bytes_of(first, last)

    def _advance(self, now_s: float) -> None:
        """Begin the transmissions that have begun by `now_s`."""
        queue = self._queue
        while queue and self._free_at_s <= now_s:
            came_at_s, packet, first, last = queue.popleft()
            self._queued_bytes -= packet.bytes_of(first, last)
            self._transmit(max(came_at_s, self._free_at_s), packet, first, last)

    def _transmit(self, start_s: float, packet: Packet, first: int, last: int) -> None:
        """Put a piece on the line: a frame for each unbroken run of packets that survive."""
        shape = self._shape
        delay_s = shape.delay_s
        if shape.jitter_s:
            delay_s = max(0.0, delay_s + self._jitter.uniform(-shape.jitter_s, shape.jitter_s))
        self._free_at_s = start_s + packet.bytes_of(first, last) / shape.bytes_per_s
        run = first
        for index in self._deck.take(last - first):
            lost = first + index
            self.counters.lost_packets += 1
            if run < lost:
                sent_at_s = start_s + packet.bytes_of(first, lost) / shape.bytes_per_s
                self._append(sent_at_s + delay_s, packet, run, lost)
            run = lost + 1
        if run < last:
            self._append(self._free_at_s + delay_s, packet, run, last)

    def _append(self, due_s: float, packet: Packet, first: int, last: int) -> None:
        self._last_due_s = max(self._last_due_s, due_s)
        self._line.append((self._last_due_s, packet, first, last))


def default_queue_bytes(shape: LinkShape) -> int:
    """Return the default queue size: one bandwidth-delay product."""
    queue_s = max(MIN_QUEUE_S, 2 * shape.delay_s)
    return max(MIN_QUEUE_BYTES, round(shape.bytes_per_s * queue_s))
