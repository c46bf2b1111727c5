"""Machines for the doctor: what a good one answers, and real ones that are set up badly."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from isthmus.orchestrator.doctor.examiner import HERE, Examiner
from isthmus.protos import versions
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.machine_facts import Facts, Folder, Limits, Tcp, Wanted
from isthmus.topology.spec.world import Topology

ROOT = Path(__file__).resolve().parents[2]
WAN = """\
version: 1
name: two
accelerators: {chip: {peak: {bf16: 50MFLOP/s}, memory: 4GiB, mfu: 0.5}}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 2, accelerator: chip, wan: {address: 127.0.0.2}}
  - {name: b, like: a, wan: {address: 127.0.0.3}}
links:
  - {between: [a, b], bandwidth: 10Gbit/s, rtt: 80ms, loss: 0.01%}
"""
"""Two sites of two ranks, and a link that holds 100 MB."""


def topology(*overrides: str) -> Topology:
    """Return the two sites, changed."""
    return load_topology(WAN, "topology.yaml", overrides)


def good_facts() -> Facts:
    """Return what a machine answers on which nothing is to be mended."""
    return Facts(
        host="machine",
        user="somebody",
        clock_s=0.0,
        build=versions.build(),
        control_protocols=(versions.CONTROL_PROTOCOL_MIN, versions.CONTROL_PROTOCOL_MAX),
        exchange_protocols=(versions.EXCHANGE_PROTOCOL_MIN, versions.EXCHANGE_PROTOCOL_MAX),
        python="3.12.0",
        torch="2.9.0",
        limits=Limits(open_files=65536, processes=100_000, locked_bytes=None),
        tcp=Tcp(
            receive_max_bytes=1 << 28,
            send_max_bytes=1 << 28,
            slow_start_after_idle=False,
            congestion="cubic",
            congestion_allowed=("reno", "cubic", "bbr"),
        ),
        shared_memory_bytes=8 << 30,
        folders=(Folder(path="/home/x/runs", free_bytes=1 << 40, free_files=1 << 20),),
    )


def facts_in(shell: str, wanted: Wanted = Wanted(), *, network: bool = False) -> Facts:  # noqa: B008
    """Return what this machine answers once commands of a shell have changed it.

    The mounts that they change, and with `network` the network, are the process's own. Skips the
    test where this user may not have such.
    """
    with Examiner(_changed(shell, network=network)) as examiner:
        return examiner.facts(wanted, 20.0)


def examiner_in(shell: str) -> Examiner:
    """Return who answers from a network of its own, which commands of a shell have set up."""
    return Examiner(_changed(shell, network=True))


@contextmanager
def two_networks() -> Iterator[tuple[list[str], list[str]]]:
    """Give the commands that run in two networks, 10.9.0.1 and 10.9.0.2, which a cable joins.

    Skips the test where this user may not have such.
    """
    if os.geteuid() != 0 or not _may(["unshare", "--net"]):
        pytest.skip("this user may have no networks of its own")
    with ExitStack() as stack:
        inside = []
        for _ in range(2):
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE
            )
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            assert holder.stdout is not None
            stack.enter_context(holder.stdout)
            holder.stdout.readline()
            inside.append(["nsenter", "--net", "--target", str(holder.pid)])
        one, other = (each[-1] for each in inside)
        cable = f"ip link add wan netns {one} type veth peer name wan netns {other}"
        subprocess.run(cable.split(), check=True)
        for number, command in enumerate(inside, start=1):
            for set_up in (
                f"ip address add 10.9.0.{number}/24 dev wan",
                "ip link set wan up",
                "ip link set lo up",
            ):
                subprocess.run([*command, *set_up.split()], check=True)
        yield inside[0], inside[1]


def _may(command: Sequence[str]) -> bool:
    done = subprocess.run([*command, "true"], capture_output=True, check=False)
    return done.returncode == 0


def _changed(shell: str, *, network: bool) -> Sequence[str]:
    own = ["unshare", "--mount", *(["--net"] if network else [])]
    own += [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    if not _may(own):
        pytest.skip("this user may have no namespaces of its own")
    return [*own, "sh", "-c", f"set -e; cd {shlex.quote(str(ROOT))}; {shell}; exec {_here()}"]


def _here() -> str:
    return shlex.join([sys.executable, *HERE[1:]])
