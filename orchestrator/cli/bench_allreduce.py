"""`isthmus bench allreduce`: how long the exchange between sites takes by itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import click

from isthmus.orchestrator.cli.bench_conditions import condition_options, emulator_for
from isthmus.orchestrator.cli.bench_folder import tell_outcome
from isthmus.orchestrator.cli.command_errors import CommandError
from isthmus.orchestrator.cli.options import (
    DURATION,
    Parsed,
    all_of,
    home_option,
    json_option,
    name_option,
    set_option,
    timeout_option,
    topology_argument,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.whole_run import run_to_end
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
    AllReduceSetting,
    Baseline,
    MeasureBaseline,
    Question,
    combinations,
)
from isthmus.orchestrator.evidence.bench.allreduce_conditions import Conditions, varying_script
from isthmus.orchestrator.evidence.bench.bench_tables import AllReduceTables
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.run_folder.home import home_folder, new_run_id
from isthmus.topology.spec.job import CODECS, TREES
from isthmus.topology.spec.units import format_size, parse_size
from isthmus.topology.spec.world import EMULATORS, Topology

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
    click.option(
        "--emulator",
        type=click.Choice((*EMULATORS, "none")),
        help="What emulates the WAN between the sites. [as the topology says]",
    ),
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
    json_option,
)
"""How it is measured."""


@click.command("allreduce")
@topology_argument
@_what_options
@_how_options
@condition_options
@click.pass_obj
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
    name = name or f"allreduce-{new_run_id()}"
    folder = home_folder(home) / "bench" / name
    own = [] if streams is None else [f"exchange.channels_per_link={streams}"]
    own += [] if chunk_bytes is None else [f"exchange.chunk={chunk_bytes}B"]
    against = tuple(dict.fromkeys(against))
    question = Question(
        topology=str(topology_path.absolute()),
        overrides=overrides,
        warmup=warmup,
        repeats=repeats,
        is_one_rank_a_site=not all_ranks,
        is_copied=copied,
        against="gloo" if "gloo" in against else None,
        baselines=against,
        conditions=conditions,
        idle_s=idle_s,
    )
    sizes_bytes = tuple(dict.fromkeys(sizes_bytes))
    found = combinations(
        question,
        topology_path,
        (*overrides, *own),
        sizes_bytes=sizes_bytes,
        codecs=tuple(dict.fromkeys(codecs)),
        trees=tuple(dict.fromkeys(trees)),
        emulator=emulator_for(conditions, topology_path, overrides, emulator),
    )
    world = found[0][1].topology
    varying = varying_script(world, timeout_s) if conditions.is_varying else ""
    baselines = _baselines(against, world, question, varying, timeout_s)
    bench = AllReduce(
        folder=folder,
        bench=AllReduceBench(name=name, question=question, settings=()),
        found=found,
        launch=functools.partial(
            run_to_end,
            timeout_s=timeout_s,
            show=lambda _: None,
            faults=_kept(varying, folder / VARYING),
        ),
        baselines=baselines,
        tell=Progress(output, len(found) + len(baselines) * len(sizes_bytes)).tell,
        new_run_id=new_run_id,
    )
    return _measure(output, bench, folder)


class Progress:
    """Says on stderr what is measured, and what it came to."""

    def __init__(self, output: Output, total: int) -> None:
        self._output = output
        self._total = total
        self._begun = 0

    def tell(self, name: str, made: AllReduceSetting | Baseline | None) -> None:
        """Tell that something begins, or what it came to."""
        if made is None:
            self._begun += 1
            return
        if isinstance(made, Baseline):
            outcome = formats.duration(made.times.median_s)
        elif made.figures is not None:
            outcome = formats.duration(made.figures.times.median_s)
        else:
            assert made.failed is not None
            outcome = f"FAILED, {made.failed.code}: {formats.words(made.failed.message)}"
        size = formats.size(made.size_bytes)
        self._output.note(f"[{self._begun}/{self._total}] {size}, {name}: {outcome}")


def _kept(varying: str, path: Path) -> tuple[str, ...]:
    """Keep the fault script of links that vary, if they do; return what names it to a run."""
    if not varying:
        return ()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(varying, encoding="utf-8")
    return ("--faults", str(path))


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


def _measure(output: Output, benchmark: AllReduce, folder: Path) -> int:
    """Measure, and tell what it came to; return the exit status.

    Raises:
        CommandError: something failed.
    """
    interrupted = None
    with INTERRUPTION.holding():
        try:
            benchmark.run()
        except KeyboardInterrupt as error:
            interrupted = INTERRUPTION.answer(error)
    bench, path = benchmark.bench, folder / ALLREDUCE
    failed = {
        each.run_id: f"run {each.run_id}: {each.failed.code}: {each.failed.message}"
        for each in bench.settings
        if each.failed is not None
    }
    if benchmark.failed and not failed:
        failed[""] = "; ".join(benchmark.failed.values())
    tables, data = AllReduceTables(bench), dataclasses.asdict(bench)
    return tell_outcome(output, tables, path, data, failed, interrupted)
