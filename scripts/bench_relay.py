"""Compare what the WAN emulator does with what it was told, and measure what that costs.

Usage: python scripts/bench_relay.py [--seconds S]
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
from isthmus.orchestrator.emulator.emulator_config import RelayConfig, RelayEndpoint
from isthmus.orchestrator.emulator.link_shape import LinkShape
from scripts.echo_sink import DEADLINE_S, PIECE, EchoSink, ping_s

RATES_BITS_PER_S = (10e6, 100e6, 500e6, 1e9)
RTTS_S = (0.0, 0.02, 0.08, 0.2)


@contextlib.contextmanager
def world(
    rate_bits_per_s: float, rtt_s: float, num_sites: int
) -> Iterator[tuple[EchoSink, list[tuple[str, int]], EmulatorProcess]]:
    """Run a relay between `num_sites` sites, all of whose gateways are one sink."""
    sites = [f"site{index}" for index in range(num_sites)]
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    sink = EchoSink(listener)
    pairs = list(itertools.permutations(sites, 2))
    config = RelayConfig(
        links=tuple(
            LinkShape(
                source=source, target=target, bytes_per_s=rate_bits_per_s / 8, delay_s=rtt_s / 2
            )
            for source, target in pairs
        ),
        endpoints=tuple(
            RelayEndpoint(source=source, target=target, gateway=0, host="127.0.0.1", port=port)
            for source, target in pairs
        ),
    )
    try:
        with running_emulator(config) as relay:
            yield sink, [(each.host, each.port) for each in relay.endpoints], relay
    finally:
        sink.close()


def connect(address: tuple[str, int]) -> socket.socket:
    """Return a connection as a gateway would make it."""
    client = socket.create_connection(address, DEADLINE_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def flood(clients: list[socket.socket], until_s: float) -> list[threading.Thread]:
    """Start a thread a connection that sends until then."""

    def send(client: socket.socket) -> None:
        with client, contextlib.suppress(ConnectionError):
            while time.perf_counter() < until_s:
                client.sendall(PIECE)

    threads = [threading.Thread(target=send, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    return threads


def throughput(sink: EchoSink, clients: list[socket.socket], rtt_s: float, seconds: float) -> float:
    """Return bytes per second that arrive, without the ramp of half an RTT."""
    threads = flood(clients, time.perf_counter() + seconds + rtt_s)
    time.sleep(rtt_s / 2 + 0.3)
    began_s, before = time.perf_counter(), sink.num_bytes
    time.sleep(seconds - 0.3)
    rate = (sink.num_bytes - before) / (time.perf_counter() - began_s)
    for thread in threads:
        thread.join(DEADLINE_S)
    return rate


def accuracy(rate_bits_per_s: float, rtt_s: float, seconds: float) -> str:
    """Measure one link; return its row."""
    with world(rate_bits_per_s, rtt_s, 2) as (sink, (address, _), _relay):
        with connect(address) as client:
            idle_s = sorted(ping_s(client, 20))
        rate_1 = throughput(sink, [connect(address)], rtt_s, seconds)
    with world(rate_bits_per_s, rtt_s, 2) as (sink, (address, _), _relay):
        rate_4 = throughput(sink, [connect(address) for _ in range(4)], rtt_s, seconds)
    with (
        world(rate_bits_per_s, rtt_s, 2) as (_sink, (address, _), _relay),
        connect(address) as client,
    ):
        threads = flood([connect(address) for _ in range(2)], time.perf_counter() + seconds)
        loaded_s = ping_s(client, 5)
        for thread in threads:
            thread.join(DEADLINE_S)
    return (
        f"{rate_bits_per_s / 1e6:6.0f} Mbit/s {rtt_s * 1e3:5.0f} ms |"
        f" {statistics.median(idle_s) * 1e3:7.1f} {idle_s[-2] * 1e3:7.1f}"
        f" {statistics.median(loaded_s) * 1e3:7.1f} |"
        f" {rate_1 * 8 / rate_bits_per_s:6.3f} {rate_4 * 8 / rate_bits_per_s:6.3f}"
    )


def cost(rate_bits_per_s: float, rtt_s: float, seconds: float) -> str:
    """Fill the six directed links of three sites; return what the relay's process used."""
    with world(rate_bits_per_s, rtt_s, 3) as (sink, addresses, relay):
        clients = [connect(address) for address in addresses]
        process = psutil.Process(relay.pid)
        before = process.cpu_times()
        began_s = time.perf_counter()
        rate = throughput(sink, clients, rtt_s, seconds)
        wall_s = time.perf_counter() - began_s
        after = process.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
    gigabits = sink.num_bytes * 8 / 1e9
    return (
        f"6 x {rate_bits_per_s / 1e6:5.0f} Mbit/s {rtt_s * 1e3:4.0f} ms | "
        f"{rate * 8 / 6 / rate_bits_per_s:6.3f} of the rate | {cpu_s / wall_s:5.2f} cores | "
        f"{cpu_s / gigabits:6.3f} CPU-s/Gbit"
    )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each transfer")
    seconds = parser.parse_args().seconds
    print(
        "configured              |  RTT ms: median, p95, loaded | of the rate: 1 and 4 connections"
    )
    for rate, rtt_s in itertools.product(RATES_BITS_PER_S, RTTS_S):
        print(accuracy(rate, rtt_s, seconds), flush=True)
    print()
    for rate in (100e6, 500e6):
        print(cost(rate, 0.04, seconds), flush=True)


if __name__ == "__main__":
    main()
