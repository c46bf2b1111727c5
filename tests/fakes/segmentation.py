"""TCP frames as a kernel hands them to a TUN device, and what a network card would make of them."""

import random
import struct

FIN, PSH, ACK, CWR = 0x01, 0x08, 0x10, 0x80
VNET_BYTES = 10
IP_BYTES = 20


def checksum(data: bytes) -> int:
    """The internet checksum, by its definition."""
    if len(data) % 2:
        data += b"\0"
    total = 0
    for at in range(0, len(data), 2):
        total += data[at] << 8 | data[at + 1]
        total = (total & 0xFFFF) + (total >> 16)
    return 0xFFFF ^ total


def pseudo_header(source: bytes, target: bytes, tcp_bytes: int) -> bytes:
    return source + target + struct.pack("!BBH", 0, 6, tcp_bytes)


def tcp_frame(rng: random.Random, payload: bytes, segment_bytes: int, flags: int = ACK) -> bytes:
    """A frame with TCP options, ready for segmentation if the payload is longer than a segment."""
    source, target = bytes([10, 203, 0, 1]), bytes([10, 203, 0, 2])
    options = rng.randbytes(4 * rng.randrange(4))
    header_bytes = IP_BYTES + 20 + len(options)
    identity, sequence = rng.randrange(1 << 16), rng.randrange(1 << 32)
    tcp_bytes = 20 + len(options) + len(payload)
    ip = struct.pack(
        "!BBHHHBBH4s4s",
        *(0x45, 0, header_bytes + len(payload), identity, 0x4000, 64, 6, 0, source, target),
    )
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    partial = 0xFFFF ^ checksum(pseudo_header(source, target, tcp_bytes))
    offset = (20 + len(options)) // 4 << 4
    tcp = struct.pack("!HHIIBBHHH", 40000, 5000, sequence, 7, offset, flags, 500, partial, 0)
    is_long = len(payload) > segment_bytes
    vnet = struct.pack(
        "=BBHHHH",
        # A kernel reports its linear part, which may hold payload, as the header's length.
        *(
            1,
            int(is_long),
            header_bytes + min(40, len(payload)) if is_long else 0,
            segment_bytes if is_long else 0,
        ),
        *(IP_BYTES, 16),
    )
    return vnet + ip + tcp + options + payload


def segments(frame: bytes) -> list[bytes]:
    """The IP packets on the wire, every checksum filled in; asserts that the frame is sound."""
    needs_checksum, gso_type, header_len, segment_bytes, start, offset = struct.unpack_from(
        "=BBHHHH", frame
    )
    assert (needs_checksum, start, offset) == (1, IP_BYTES, 16)
    assert header_len <= len(frame) - VNET_BYTES
    ip, tcp = frame[VNET_BYTES : VNET_BYTES + IP_BYTES], frame[VNET_BYTES + IP_BYTES :]
    assert checksum(ip) == 0
    assert struct.unpack_from("!H", ip, 2)[0] == len(ip) + len(tcp)
    assert checksum(pseudo_header(ip[12:16], ip[16:20], len(tcp))) == (
        0xFFFF ^ struct.unpack_from("!H", tcp, 16)[0]
    )
    tcp_header_bytes = (tcp[12] >> 4) * 4
    payload = tcp[tcp_header_bytes:]
    if gso_type == 0:
        assert segment_bytes == 0
        return [_packet(ip, tcp[:tcp_header_bytes], payload, 0, 0, 0)]
    assert gso_type == 1
    assert len(payload) > segment_bytes
    starts = range(0, len(payload), segment_bytes)
    return [
        _packet(
            ip,
            tcp[:tcp_header_bytes],
            payload[at : at + segment_bytes],
            index,
            at,
            (0 if at == starts[-1] else FIN | PSH) | (CWR if at else 0),
        )
        for index, at in enumerate(starts)
    ]


def _packet(ip: bytes, tcp: bytes, payload: bytes, index: int, at: int, no_flags: int) -> bytes:
    (identity,) = struct.unpack_from("!H", ip, 4)
    (sequence,) = struct.unpack_from("!I", tcp, 4)
    num_bytes = len(ip) + len(tcp) + len(payload)
    ip = ip[:2] + struct.pack("!HH", num_bytes, (identity + index) % (1 << 16)) + ip[6:]
    ip = ip[:10] + b"\0\0" + ip[12:]
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    tcp = tcp[:4] + struct.pack("!I", (sequence + at) % (1 << 32)) + tcp[8:]
    tcp = tcp[:13] + bytes([tcp[13] & ~no_flags & 0xFF]) + tcp[14:16] + b"\0\0" + tcp[18:]
    whole = pseudo_header(ip[12:16], ip[16:20], len(tcp) + len(payload)) + tcp + payload
    return ip + tcp[:16] + struct.pack("!H", checksum(whole)) + tcp[18:] + payload
