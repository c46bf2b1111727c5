"""The runs of `isthmus bench allreduce`: one job that ships, and the overrides of each setting."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from orchestrator.documents import Pair, load_pair, load_topology_file
from topology.documents.load import split_overrides
from topology.reduction_plans import plan_reduction

_LOOPBACK: Final = "{bandwidth: 100Gbit/s, rtt: 100us}"
"""More than gateways reach on one machine: none waits for a link that is not there."""
_LOOPBACK_PIECES: Final = {"exchange.chunk": "8MiB", "exchange.bucket": "64MiB"}
"""Where no link has to be kept full, fewer chunks and buckets cost less: docs/benchmarks.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure: every combination of the first three."""

    sizes_bytes: tuple[int, ...]
    codecs: tuple[str, ...]
    """Empty: what the job that ships says, or `overrides`; likewise the next."""
    trees: tuple[str, ...]
    topology_path: Path
    overrides: tuple[str, ...]
    """The user's own, of both documents; what stands in the fields here wins over them."""
    count: int
    """Repetitions a run, the warm-up included."""
    channels_per_link: int | None
    chunk_bytes: int | None
    is_one_rank_a_site: bool
    is_copied: bool
    """Whether the tensor lies in the rank's own memory, and not in what `site.empty` returns."""
    emulator: str | None
    """`auto`, `relay`, `netns` or `none`; None: as the topology says.

    With `none`, sites are told of this machine's own links in place of the topology's, unless
    `overrides` speak of links, chunks or buckets themselves.
    """


@dataclass(frozen=True, slots=True)
class Combination:
    """One setting, and the documents of its run."""

    size_bytes: int
    pair: Pair

    @property
    def codec(self) -> str:
        """What the tensor travels as."""
        return self.pair.job.exchange.codec

    @property
    def tree(self) -> str:
        """As asked for."""
        reduction = self.pair.job.reduction
        return "as written" if reduction.trees else reduction.tree

    @property
    def plan(self) -> str:
        """How chunks are reduced, in words."""
        return plan_reduction(self.pair.job, self.pair.topology).why


def combinations(wanted: Wanted) -> list[Combination]:
    """Return the settings, sizes first.

    Raises:
        ConfigError: a document has mistakes in some setting.
    """
    shared = _shared_overrides(wanted)
    found = []
    choices = itertools.product(
        wanted.sizes_bytes,
        [[f"exchange.codec={codec}"] for codec in wanted.codecs] or [[]],
        [[f"reduction.tree={tree}"] for tree in wanted.trees] or [[]],
    )
    memory = "own" if wanted.is_copied else "shared"
    for size_bytes, codec, tree in choices:
        arguments = [str(size_bytes), str(wanted.count), memory]
        own = [*codec, *tree, f"arguments={json.dumps(arguments)}"]
        pair = load_pair(_job_path(), [*shared, *own], wanted.topology_path)
        found.append(Combination(size_bytes, pair))
    return found


def _shared_overrides(wanted: Wanted) -> list[str]:
    overrides = list(wanted.overrides)
    if wanted.channels_per_link is not None:
        overrides.append(f"exchange.channels_per_link={wanted.channels_per_link}")
    if wanted.chunk_bytes is not None:
        overrides.append(f"exchange.chunk={wanted.chunk_bytes}B")
    if wanted.emulator == "none":
        overrides += ["emulate=false", *_loopback(wanted)]
    elif wanted.emulator is not None:
        overrides += ["emulate=true", f"emulator={wanted.emulator}"]
    if wanted.is_one_rank_a_site:
        topology = load_topology_file(wanted.topology_path, split_overrides(wanted.overrides)[0])
        for site in topology.sites:
            overrides += [
                f"sites.{site.index}.nodes=1",
                f"sites.{site.index}.accelerators_per_node=1",
            ]
    return overrides


def _loopback(wanted: Wanted) -> list[str]:
    """Return what describes links of this machine."""
    own = [override.split("=")[0] for override in wanted.overrides]
    found = []
    if not any(key.split(".")[0] == "links" for key in own):
        load_topology_file(
            wanted.topology_path, split_overrides(wanted.overrides)[0]
        )  # it is valid
        links = yaml.safe_load(wanted.topology_path.read_text()).get("links") or []
        found += [f"links.{index}.measured={_LOOPBACK}" for index in range(len(links))]
    if wanted.chunk_bytes is not None:
        own.append("exchange.chunk")
    return found + [f"{key}={size}" for key, size in _LOOPBACK_PIECES.items() if key not in own]


def _job_path() -> Path:
    """Return the job that ships with the sites' part, without importing what is theirs."""
    found = importlib.util.find_spec("sites")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "bench" / "allreduce.yaml"


def sizes_of(found: Sequence[Combination]) -> tuple[int, ...]:
    """Return each size once, in order."""
    return tuple(dict.fromkeys(each.size_bytes for each in found))
