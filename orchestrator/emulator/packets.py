"""What a TUN device with a virtio_net_hdr hands over.

One frame, standing for one or more IP packets.

The kernel leaves segmentation to the device (GSO), so one read may return up to 64 KiB of a TCP
stream under one header. On a wire it would be `num_wire` packets of an MTU each with their headers
repeated; that is what a link counts, queues and loses. When only some of them survive, `part` makes
a frame that stands for just those, as if the kernel had cut them out itself.

Checksums are not computed: NEEDS_CSUM asks the receiving kernel to trust (or, if it forwards, to
fill in) what has never left this machine, so TCP's field holds only the pseudo-header's sum.
"""

from __future__ import annotations

import struct

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
        num_wire: IP packets that it stands for.
        header_bytes: IP and TCP headers, which each of them repeats; 0 if it is only one packet.
        segment_bytes: Payload of each but the last.
        num_bytes: Of all those packets together.
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
        """Return the bytes of the wire packets `first` to `last`, which is not among them."""
        if last == self.num_wire:
            return self.num_bytes - first * (self.segment_bytes + self.header_bytes)
        return (last - first) * (self.segment_bytes + self.header_bytes)

    def num_fitting(self, first: int, room_bytes: int) -> int:
        """Return how many wire packets from `first` on go into `room_bytes`."""
        if self.bytes_of(first, self.num_wire) <= room_bytes:
            return self.num_wire - first
        fitting = max(0, room_bytes) // (self.segment_bytes + self.header_bytes)
        return min(fitting, self.num_wire - first - 1)

    def part(self, first: int, last: int) -> Part:
        """Return a frame that stands for the wire packets `first` to `last`, without `last`."""
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
    """Return the packet of a frame, or None for what no link carries: not IPv4, or malformed.

    A site's processes may write to their device what they like, so nothing is taken for granted.
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
