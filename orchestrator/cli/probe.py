"""`isthmus probe`: measures the links between the sites' gateways, and writes the figures back."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import (
    DURATION,
    Parsed,
    coordinator_option,
    emulation_options,
    home_option,
    set_option,
    topology_argument,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.whole_run import NOT_EMULATED, run_to_end
from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.link_probe import (
    Direction,
    FileChangedError,
    directions,
    estimate_s,
    link_figures,
    longest_s,
    probing_pair,
    read_directions,
    replace_text,
)
from isthmus.orchestrator.evidence.record.bench_record import Failed
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.orchestrator.evidence.view import formats as shown
from isthmus.orchestrator.evidence.view.fitting_table import Column, FittingTable
from isthmus.orchestrator.run_folder.home import home_folder, new_run_id
from isthmus.orchestrator.run_folder.run_files import METRICS, MetricsError, read_metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.documents.editing import with_measured
from isthmus.topology.spec.job import Probe
from isthmus.topology.spec.measured_links import FAR
from isthmus.topology.spec.units import format_duration, format_rate
from isthmus.topology.text.yaml_document import read_document

TABLE_WIDTH = 140
"""Where no terminal sets one."""


def _connections(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 32 for part in parts):
        raise ValueError(f"want whole numbers from 1 to 32, as 1,4,16; got {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


@click.command("probe")
@topology_argument
@coordinator_option(
    "Measure between this coordinator's agents. [$ISTHMUS_COORDINATOR, else all are started here]"
)
@emulation_options
@click.option(
    "--connections",
    type=Parsed("n,n", _connections),
    default="1,4,16",
    help="Numbers of TCP connections side by side, measured one after another.",
)
@click.option(
    "--window",
    "window_s",
    type=DURATION,
    default="2s",
    help="For how long bytes are counted: 100ms to 60s.",
)
@click.option("--write", is_flag=True, help="Write the figures into TOPOLOGY; comments stay.")
@set_option
@home_option
@with_output
def command(
    output: Output,
    topology_path: Path,
    coordinator: str | None,
    connections: tuple[int, ...],
    window_s: float,
    write: bool,
    overrides: tuple[str, ...],
    home: Path | None,
) -> int:
    """Measure every link of TOPOLOGY, each direction, between the sites' gateways.

    Round trips, throughput over 1, 4 and 16 connections, and losses where the kernel tells.
    """
    if not 0.1 <= window_s <= 60:
        raise click.UsageError("--window: want 100ms to 60s")
    probe = Probe(connections=connections, window_s=window_s)
    pair = probing_pair(topology_path, overrides, probe)
    found = topology_path.read_bytes()
    if not directions(pair.topology):
        raise click.UsageError(f"{topology_path} has no two sites with a link each way")
    measured, emulator_used = _measure(output, pair, probe, home_folder(home), coordinator)
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if not output.as_json:
        _print_table(measured)
    for line in _deviations(measured):
        output.note(f"warning: {line}")
    written = _write(pair, found, measured, at, emulator_used) if write else []
    data = {
        "at": at,
        "emulator": emulator_used,
        "links": [_view(each) for each in measured],
        "written": [str(topology_path)] if written else [],
    }
    return output.result(data, f"{topology_path}: {len(written)} links written" if written else "")


def _measure(
    output: Output,
    pair: Pair,
    probe: Probe,
    home: Path,
    coordinator: str | None,
) -> tuple[list[Direction], str | None]:
    """Make the run; return the directions, and what emulated the WAN.

    Raises:
        CommandError: the run failed, or its figures are missing.
    """
    topology, run_id, folders = pair.topology, new_run_id(), [home]
    output.note(
        f"measuring {len(directions(topology))} directions for about "
        f"{shown.duration(estimate_s(topology, probe))}"
    )

    def show(run: control_pb2.Run) -> None:
        folders[0] = Path(run.folder)

    ended = run_to_end(
        pair,
        home,
        run_id,
        timeout_s=longest_s(topology, probe),
        show=show,
        coordinator=coordinator,
    )
    where = {"run_id": run_id, "folder": str(folders[0])}
    if isinstance(ended.failed, Failed):
        raise CommandError(ended.failed.code, ended.failed.message, where)
    emulator = ended.emulator if ended.emulator != NOT_EMULATED else None
    if topology.emulate and emulator is None:
        emulator = "relay"  # a coordinator elsewhere does not tell: claim no more than is sure
    try:
        records = read_metrics(folders[0] / METRICS)
        return read_directions(records, topology, directions(topology), emulator), emulator
    except (MeasurementError, MetricsError) as error:
        raise CommandError("INTERNAL", f"run {run_id}: {error}", where) from error


def _write(
    pair: Pair,
    found: bytes,
    measured: Sequence[Direction],
    at: str,
    emulator: str | None,
) -> list[int]:
    """Put the figures into the file; return which links have them now.

    Raises:
        CommandError: FILE_CHANGED.
        ConfigError: the file is written in a way that cannot be edited.
    """
    source, text = str(pair.topology_path), found.decode("utf-8-sig")
    figures = link_figures(
        read_document(text, source),
        pair.topology,
        measured,
        at=at,
        is_emulated=emulator is not None,
    )
    try:
        replace_text(pair.topology_path, found, with_measured(text, source, figures))
    except FileChangedError as error:
        raise CommandError("FILE_CHANGED", str(error), {"file": source}) from error
    return sorted(figures)


def _deviations(measured: Sequence[Direction]) -> list[str]:
    """Return what is far from what is configured, in sentences."""
    lines = []
    for each in measured:
        for what, form, configured, found in (
            ("bandwidth", format_rate, each.configured_bytes_per_s, each.bandwidth_bytes_per_s),
            ("rtt", format_duration, each.configured_rtt_s, each.rtt_s_p50),
        ):
            if configured and abs(found / configured - 1) > FAR:
                lines.append(
                    f"{each.source} to {each.target}: {what} is {form(found)}, "
                    f"{form(configured)} is configured ({found / configured - 1:+.0%})"
                )
    return lines


def _view(each: Direction) -> dict[str, Any]:
    return {
        **dataclasses.asdict(each),
        "bytes_per_s": {str(count): rate for count, rate in each.bytes_per_s.items()},
        "bandwidth_bytes_per_s": each.bandwidth_bytes_per_s,
        "loss": each.loss,
    }


def _print_table(measured: Sequence[Direction]) -> None:
    counts = list(measured[0].bytes_per_s)
    columns = [
        Column("link", [f"{each.source} -> {each.target}" for each in measured], is_text=True),
        Column("configured", [shown.rate(each.configured_bytes_per_s) for each in measured]),
        *(
            Column(
                "1 connection" if count == 1 else f"{count} connections",
                [shown.rate(each.bytes_per_s[count]) for each in measured],
            )
            for count in counts
        ),
        Column("configured", [shown.duration(each.configured_rtt_s) for each in measured]),
        Column("RTT p50", [shown.duration(each.rtt_s_p50) for each in measured]),
        Column("p99", [shown.duration(each.rtt_s_p99) for each in measured]),
        Column("configured", [f"{each.configured_loss:.3g}" for each in measured]),
        Column("lost", [_lost(each) for each in measured]),
    ]
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(FittingTable(columns))


def _lost(each: Direction) -> str:
    """Return how many segments were lost of how many."""
    return shown.UNKNOWN if each.segments is None else f"{each.lost_segments} of {each.segments}"
