"""`isthmus init` and `topology`: files to start from, and what there is to name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import (
    PATH,
    json_option,
    set_option,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.run_folder.home import JOB, TOPOLOGY
from isthmus.topology.presets.templates import (
    DEFAULT_PRESET,
    PRESETS,
    SCHEMAS,
    job_yaml,
    topology_yaml,
)

TABLE_WIDTH = 120
"""Where no terminal sets one."""


@click.command("init")
@click.argument("folder", metavar="[DIR]", type=PATH, default=".")
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default=DEFAULT_PRESET,
    help="Which case to start from; `isthmus topology presets` says what they are.",
)
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
@with_output
def init(output: Output, folder: Path, preset: str, force: bool) -> int:
    """Write a commented topology.yaml and job.yaml into DIR; they run as they are."""
    texts = {folder / TOPOLOGY: topology_yaml(preset), folder / JOB: job_yaml(preset)}
    from isthmus.topology.schemas.schema import write_schemas

    there = [str(path) for path in texts if path.exists()]
    if there and not force:
        raise CommandError("FILE_EXISTS", f"already there: {', '.join(there)}", {"files": there})
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    (folder / SCHEMAS).mkdir(exist_ok=True)
    write_schemas(folder / SCHEMAS)
    files = [str(path) for path in texts]
    output.note(f"next: isthmus launch {folder / JOB}")
    return output.result({"files": files}, "\n".join(files))


@click.group("topology")
@json_option
def topology() -> None:
    """Show a topology, the presets, and known accelerators."""


@topology.command("presets")
@with_output
def presets_command(output: Output) -> int:
    """List what `isthmus init --preset` starts from."""
    _print(output, {"preset": list(PRESETS), "": list(PRESETS.values())})
    return output.result({"presets": [{"name": n, "what": w} for n, w in PRESETS.items()]})


@topology.command("accelerators")
@with_output
def accelerators_command(output: Output) -> int:
    """List the accelerators that a topology may name, their figures, and who says so."""
    from isthmus.topology.catalogue.accelerators import catalogue
    from isthmus.topology.spec.units import format_fraction, format_size
    from isthmus.topology.spec.world import DTYPES

    entries = catalogue().values()
    dtypes = [
        dtype for dtype in DTYPES if any(dtype in entry.peak_flops_per_s for entry in entries)
    ]
    table = {
        "accelerator": [each.name for each in entries],
        "memory": [format_size(each.memory_bytes) for each in entries],
        "mfu": [format_fraction(each.mfu) for each in entries],
        **{
            dtype: [_tera(each.peak_flops_per_s.get(dtype)) for each in entries] for dtype in dtypes
        },
    }
    _print(output, table)
    output.text("\nmemory and peaks (dense, TFLOP/s) of one accelerator, according to")
    for entry in entries:
        output.text(f"  {entry.name}: {entry.source}")
    data = [
        {
            "name": entry.name,
            "peak_flops_per_s": dict(entry.peak_flops_per_s),
            "memory_bytes": entry.memory_bytes,
            "mfu": entry.mfu,
            "source": entry.source,
        }
        for entry in entries
    ]
    return output.result({"accelerators": data})


@topology.command("show")
@click.argument("file", type=PATH)
@set_option
@with_output
def show_command(output: Output, file: Path, overrides: tuple[str, ...]) -> int:
    """Show the sites and links of FILE as they are used: names followed, round trips derived."""
    from isthmus.orchestrator.documents import load_topology_file
    from isthmus.topology.documents.load import split_overrides

    own, others = split_overrides(overrides)
    if others:
        raise click.UsageError(f"--set {others[0]}: is a job's; want a topology's")
    topology = load_topology_file(file, own)
    sites = [
        {
            "name": site.name,
            "nodes": site.nodes,
            "accelerators_per_node": site.accelerators_per_node,
            "gateways_per_node": "auto" if site.chooses_gateways else site.gateways_per_node,
            "accelerator": site.accelerator.name,
            "memory_bytes": site.accelerator.memory_bytes,
        }
        for site in topology.sites
    ]
    links = [
        {
            "source": link.source,
            "target": link.target,
            "bytes_per_s": link.bytes_per_s,
            "rtt_s": link.rtt_s,
            "rtt_origin": link.rtt_origin,
            "jitter_s": link.jitter_s,
            "loss": link.loss,
            "distance_km": link.distance_km,
            "measured_at": link.measured_at,
        }
        for link in topology.links
    ]
    _print(output, _sites_table(sites))
    output.text("")
    _print(output, _links_table(links))
    return output.result({"name": topology.name, "sites": sites, "links": links})


def _sites_table(sites: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    return {
        "site": [each["name"] for each in sites],
        "nodes": [f"{each['nodes']}" for each in sites],
        "ranks": [f"{each['nodes'] * each['accelerators_per_node']}" for each in sites],
        "accelerator": [each["accelerator"] for each in sites],
    }


def _links_table(links: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    from isthmus.topology.spec.units import (
        format_distance,
        format_duration,
        format_fraction,
        format_rate,
    )

    def shown(key: str, form: Any) -> list[str]:  # noqa: ANN401 - one of topology/spec/units.py
        return [form(each[key]) if each[key] else "-" for each in links]

    return {
        "link": [f"{each['source']} -> {each['target']}" for each in links],
        "bandwidth": shown("bytes_per_s", format_rate),
        "RTT": [format_duration(each["rtt_s"]) for each in links],
        "from": [each["rtt_origin"] for each in links],
        "jitter": shown("jitter_s", format_duration),
        "loss": shown("loss", format_fraction),
        "distance": shown("distance_km", format_distance),
        "measured": [(each["measured_at"] or "-")[:19] for each in links],
    }


def _tera(flops_per_s: float | None) -> str:
    return "-" if flops_per_s is None else f"{flops_per_s / 1e12:.4g}"


def _print(output: Output, columns: Mapping[str, Sequence[str]]) -> None:
    """Print a table for people; with --json, nothing."""
    if output.as_json:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading, cells in columns.items():
        is_number = all(cell == "-" or cell[:1].isdigit() for cell in cells)
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(table)
