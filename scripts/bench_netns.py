"""Compare what the packet emulator does with what it was told, and measure what that costs.

Usage: python scripts/bench_netns.py [--seconds S] [--rates MBIT,..] [--rtts MS,..] [--losses P,..]
Needs root. The congestion control is --congestion for all connections, cubic unless told otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import statistics
import threading
import time
from collections.abc import Iterator

import psutil

from isthmus.orchestrator.emulator.emulator_child import EmulatorProcess, running_emulator
from isthmus.orchestrator.emulator.emulator_config import NetnsConfig
from isthmus.orchestrator.emulator.link_shape import LinkShape
from scripts.echo_sink import DEADLINE_S, PIECE, EchoSink, ping_s
from tests.fakes.sockets import open_socket

PORT = 5000
PAYLOAD_SHARE = 1448 / 1500


class Sites:
    """Two emulated sites: connections from the first to a sink at the second."""

    def __init__(self, emulator: EmulatorProcess, congestion: str) -> None:
        self.emulator = emulator
        self._near, self._far = emulator.sites["a"], emulator.sites["b"]
        self._congestion = congestion.encode()
        listener = open_socket(self._far.net)
        listener.bind((self._far.address, PORT))
        listener.listen(64)
        self.sink = EchoSink(listener)

    def connect(self) -> socket.socket:
        """Return a connection from site `a`."""
        client = open_socket(self._near.net)
        client.settimeout(DEADLINE_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._congestion)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.connect((self._far.address, PORT))
        return client


@contextlib.contextmanager
def world(rate_bits_per_s: float, rtt_s: float, loss: float, congestion: str) -> Iterator[Sites]:
    """Emulate two sites, with a sink at the second; loss only towards it."""
    links = tuple(
        LinkShape(
            source=source,
            target=target,
            bytes_per_s=rate_bits_per_s / 8,
            delay_s=rtt_s / 2,
            loss=loss if target == "b" else 0.0,
        )
        for source, target in itertools.permutations("ab", 2)
    )
    with running_emulator(NetnsConfig(sites=("a", "b"), links=links, seed=1)) as emulator:
        sites = Sites(emulator, congestion)
        try:
            yield sites
        finally:
            sites.sink.close()


def throughput(
    sites: Sites, num_connections: int, warm_s: float, seconds: float
) -> tuple[float, float]:
    """Return bytes of payload per second that arrive once warm, and the emulator's cores."""
    stop = threading.Event()

    def send(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                client.sendall(PIECE)

    clients = [sites.connect() for _ in range(num_connections)]
    threads = [threading.Thread(target=send, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    time.sleep(warm_s)
    process = psutil.Process(sites.emulator.pid)
    before, cpu_before_s = sites.sink.num_bytes, sum(process.cpu_times()[:2])
    began_s = time.perf_counter()
    time.sleep(seconds)
    took_s = time.perf_counter() - began_s
    rate = (sites.sink.num_bytes - before) / took_s
    cores = (sum(process.cpu_times()[:2]) - cpu_before_s) / took_s
    stop.set()
    for client, thread in zip(clients, threads, strict=True):
        client.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE_S)
        client.close()
    return rate, cores


def row(rate_bits_per_s: float, rtt_s: float, loss: float, congestion: str, seconds: float) -> str:
    """Measure one link; return its row."""
    warm_s = 1.0 + 20 * rtt_s
    with world(rate_bits_per_s, rtt_s, loss, congestion) as sites:
        with sites.connect() as client:
            idle_s = sorted(ping_s(client, 20))
        rates, cores = [], 0.0
        for num_connections in (1, 4):
            rate, cores = throughput(sites, num_connections, warm_s, seconds)
            rates.append(rate * 8 / rate_bits_per_s / PAYLOAD_SHARE)
        link = sites.emulator.counters()["a", "b"]
    num_packets = link["sent_bytes"] / 1500
    return (
        f"{rate_bits_per_s / 1e6:5.0f} {rtt_s * 1e3:5.0f} {loss * 100:6.2f} |"
        f" {statistics.median(idle_s) * 1e3:7.2f} {idle_s[-2] * 1e3:7.2f} |"
        f" {rates[0]:6.3f} {rates[1]:6.3f} | {cores:5.2f} |"
        f" {link['lost_packets'] / num_packets * 100:6.3f} {link['dropped_packets']:7d}"
    )


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each transfer, once warm")
    parser.add_argument("--rates", type=_numbers, default=[50, 200, 500, 1000], help="Mbit/s")
    parser.add_argument("--rtts", type=_numbers, default=[1, 20, 80, 150], help="ms")
    parser.add_argument("--losses", type=_numbers, default=[0.0], help="shares, towards the sink")
    parser.add_argument("--congestion", default="cubic")
    chosen = parser.parse_args()
    print("configured         | RTT ms          | of 96.5 %:    | cores | lost %, dropped")
    print("Mbit/s  ms  loss % | median, p95     | 1, 4 connections | (4 connections)")
    for rate, rtt_ms, loss in itertools.product(chosen.rates, chosen.rtts, chosen.losses):
        print(
            row(rate * 1e6, rtt_ms / 1e3, loss, chosen.congestion, chosen.seconds),
            flush=True,
        )


if __name__ == "__main__":
    main()
