"""What the runs of an all-reduce benchmark are told."""

from pathlib import Path

import pytest

from orchestrator.evidence.bench.allreduce import Wanted, combinations

TOPOLOGY = """\
version: 1
name: two
sites:
  - {name: east, nodes: 1, accelerators_per_node: 1, accelerator: cpu}
  - {name: west, like: east}
links:
  - {between: [east, west], bandwidth: 200Mbit/s, rtt: 80ms}
security: {mode: insecure}
"""


def told(folder: Path, *overrides: str, emulator: str | None) -> tuple[float, float, int, int]:
    """Return the link's rate and round trip, the chunk and the bucket."""
    path = folder / "topology.yaml"
    path.write_text(TOPOLOGY)
    wanted = Wanted(
        sizes_bytes=(1 << 20,),
        codecs=("fp32",),
        trees=(),
        topology_path=path,
        overrides=overrides,
        count=2,
        is_one_rank_a_site=True,
        is_copied=False,
        emulator=emulator,
    )
    (found,) = combinations(wanted)
    link = found.pair.topology.links[0]
    exchange = found.pair.job.exchange
    return link.bytes_per_s, link.rtt_s, exchange.chunk_bytes, exchange.bucket_bytes


@pytest.mark.parametrize("emulator", [None, "netns"])
def test_emulated_links_are_those_of_the_topology(tmp_path: Path, emulator: str | None) -> None:
    assert told(tmp_path, emulator=emulator) == (25e6, 0.08, 1 << 20, 4 << 20)


def test_without_emulation_sites_are_told_of_this_machines_links(tmp_path: Path) -> None:
    assert told(tmp_path, emulator="none") == (12.5e9, 1e-4, 8 << 20, 64 << 20)


def test_what_the_user_says_of_links_chunks_and_buckets_stands(tmp_path: Path) -> None:
    own = ("links.0.rtt=10ms", "exchange.chunk=2MiB", "exchange.bucket=8MiB")
    assert told(tmp_path, *own, emulator="none") == (25e6, 0.01, 2 << 20, 8 << 20)
    assert told(tmp_path, *own[:1], emulator="none") == (25e6, 0.01, 8 << 20, 64 << 20)
