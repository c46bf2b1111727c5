"""`isthmus bench allreduce`: how long the exchange between sites takes by itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.bench_conditions import condition_options, emulator_for
from isthmus.orchestrator.cli.bench_folder import (
    Progress,
    bench_folder,
    held_folder,
    measured,
    sources,
)
from isthmus.orchestrator.cli.options import (
    DURATION,
    Parsed,
    all_of,
    emulator_option,
    home_option,
    name_option,
    set_option,
    timeout_option,
    topology_argument,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from isthmus.orchestrator.evidence.bench.allreduce_baselines import (
    measure_baseline,
    require_full_mesh,
)
from isthmus.orchestrator.evidence.bench.allreduce_bench import (
    ALLREDUCE,
    BASELINES,
    AllReduce,
    AllReduceBench,
    MeasureBaseline,
    Question,
    combinations,
)
from isthmus.orchestrator.evidence.bench.allreduce_conditions import Conditions, varying_script
from isthmus.orchestrator.evidence.bench.bench_tables import allreduce_tables
from isthmus.orchestrator.run_folder.home import new_run_id
from isthmus.topology.spec.codec_names import CODECS
from isthmus.topology.spec.job import TREES
from isthmus.topology.spec.units import format_size, parse_size
from isthmus.topology.spec.world import Topology

MAX_BYTES = 16 << 30
"""Ranks hold the tensor three times, and the host's memory is all there is."""
VARYING = "varying.yaml"
"""In the benchmark's folder: the fault script of --varying."""


def _tensor_size(text: str) -> int:
    size_bytes = parse_size(text)
    if size_bytes % 4 or not 4 <= size_bytes <= MAX_BYTES:
        raise ValueError(f"want a multiple of 4B up to {format_size(MAX_BYTES)}")
    return size_bytes


TENSOR_SIZE = Parsed("size", _tensor_size)
"""A size with its unit, of whole float32 numbers; given to the command in bytes."""

_what_options = all_of(
    click.option(
        "--size",
        "sizes_bytes",
        type=TENSOR_SIZE,
        multiple=True,
        default=("64MiB",),
        help="Size of the float32 tensor. May be repeated, as --codec and --tree may.",
    ),
    click.option(
        "--codec",
        "codecs",
        type=click.Choice(CODECS),
        multiple=True,
        help="How the tensor is encoded when it crosses. [fp32]",
    ),
    click.option(
        "--tree",
        "trees",
        type=click.Choice(TREES),
        multiple=True,
        help="The trees of sites along which it is summed. [auto]",
    ),
    click.option("--streams", type=click.IntRange(1, 32), help="Connections between two gateways."),
    click.option(
        "--chunk",
        "chunk_bytes",
        type=TENSOR_SIZE,
        help="Size of a chunk, as float32: a frame carries one.",
    ),
    set_option,
    click.option(
        "--all-ranks",
        is_flag=True,
        help="Start as many ranks a site as the topology says. [one a site]",
    ),
    click.option(
        "--copied",
        is_flag=True,
        help="Copy the tensor to the gateway's memory and back. [it lies there: site.empty]",
    ),
)
"""What is measured."""


_how_options = all_of(
    click.option(
        "--repeats", type=click.IntRange(1, 1000), default=5, help="Repetitions that are measured."
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0, 1000),
        default=2,
        help="Repetitions before the first that is measured.",
    ),
    emulator_option("What emulates the WAN between the sites. [as the topology says]", "none"),
    click.option(
        "--against",
        type=click.Choice(tuple(BASELINES)),
        multiple=True,
        help="Measure this too, on the same links; not with the relay. May be repeated.",
    ),
    click.option(
        "--idle",
        "idle_s",
        type=DURATION,
        default="0s",
        help="A pause of all sites before each repetition.",
    ),
    name_option,
    timeout_option("10min", "A combination that takes longer has failed."),
    home_option,
    with_output,
)
"""How it is measured."""


@click.command("allreduce")
@topology_argument
@_what_options
@_how_options
@condition_options
def command(
    output: Output,
    topology_path: Path,
    sizes_bytes: tuple[int, ...],
    codecs: tuple[str, ...],
    trees: tuple[str, ...],
    streams: int | None,
    chunk_bytes: int | None,
    overrides: tuple[str, ...],
    all_ranks: bool,
    copied: bool,
    repeats: int,
    warmup: int,
    emulator: str | None,
    against: tuple[str, ...],
    idle_s: float,
    name: str | None,
    timeout_s: float,
    home: Path | None,
    conditions: Conditions,
) -> int:
    """Time the average of one tensor over all sites of TOPOLOGY, for each combination.

    Every combination is an ordinary run on this machine, with one rank a site. After each
    repetition the results of all sites are compared bit for bit.
    """
    own = [] if streams is None else [f"exchange.channels_per_link={streams}"]
    own += [] if chunk_bytes is None else [f"exchange.chunk={chunk_bytes}B"]
    against = tuple(dict.fromkeys(against))
    question = Question(
        overrides=overrides,
        warmup=warmup,
        repeats=repeats,
        is_one_rank_a_site=not all_ranks,
        is_copied=copied,
        baselines=against,
        conditions=conditions,
        idle_s=idle_s,
    )
    found = combinations(
        question,
        topology_path,
        (*overrides, *own),
        sizes_bytes=tuple(dict.fromkeys(sizes_bytes)),
        codecs=tuple(dict.fromkeys(codecs)),
        trees=tuple(dict.fromkeys(trees)),
        emulator=emulator_for(conditions, topology_path, overrides, emulator),
    )
    pair = found[0][1]
    varying = varying_script(pair.topology, timeout_s) if conditions.is_varying else ""
    baselines = _baselines(against, pair.topology, question, varying, timeout_s)
    name = name or f"allreduce-{new_run_id()}"
    path = bench_folder(home, name) / ALLREDUCE
    with held_folder(path):
        if varying:
            (path.parent / VARYING).write_text(varying, encoding="utf-8")
        progress = Progress(timeout_s)
        bench = AllReduce(
            folder=path.parent,
            bench=AllReduceBench(name=name, **sources(pair), question=question, settings=()),
            found=found,
            baselines=baselines,
            faults=("--faults", str(path.parent / VARYING)) if varying else (),
            launch=progress.launch,
            watch=progress,
        )
        return measured(output, progress, bench, allreduce_tables)


def _baselines(
    names: Sequence[str], topology: Topology, question: Question, varying: str, timeout_s: float
) -> dict[str, MeasureBaseline]:
    """Return what measures the baselines of those names, where they can be.

    Raises:
        CommandError: they cannot cross the links as they are emulated here.
        ConfigError: some site cannot reach another.
    """
    if not names:
        return {}
    require_full_mesh(topology, names)
    if topology.emulate:
        why = netns_problem() if topology.emulator != "relay" else "the relay was asked for"
        if why is not None:
            raise CommandError(
                "EMULATION_FAILED",
                f"--against {names[0]} needs network namespaces (--emulator netns), or none: {why}",
            )
    return {
        name: functools.partial(
            measure_baseline,
            name,
            topology,
            warmup=question.warmup,
            repeats=question.repeats,
            idle_s=question.idle_s,
            varying=varying,
            is_emulated=topology.emulate,
            timeout_s=timeout_s,
        )
        for name in names
    }
