"""Folders of runs with every kind of record, as coordinators leave them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.run_folder.home import TOPOLOGY, RunFolder, claim_run_folder
from isthmus.orchestrator.run_folder.run_files import METRICS, RunFiles
from isthmus.topology.documents.load import load_topology
from isthmus.topology.presets.templates import job_yaml, topology_yaml
from isthmus.topology.spec.world import Link

BEGAN_S = 1_790_000_000.0
"""Wall time at which every such run was submitted."""
ACTIVE_S = BEGAN_S + 5.0
STEP_S = 0.4
SITES = ("oregon", "virginia", "montreal")
Record = dict[str, Any]


def record_run(
    home: Path,
    run_id: str = "r1",
    *,
    sites: tuple[str, ...] = SITES,
    topology: str | None = None,
    steps: int = 40,
    buckets: int = 6,
    every: int = 10,
    faults: tuple[Mapping[str, str], ...] = (),
    name: str = "hello-wan",
    state: str = "SUCCEEDED",
    reason: str = "",
    seed: int = 7,
    job_overrides: tuple[str, ...] = (),
) -> RunFolder:
    """Write a run that has ended.

    Args:
        home: where.
        run_id: its id.
        sites: their names, in place of the topology's in all but its file.
        topology: YAML; that of `isthmus init` if there is none.
        steps: of training.
        buckets: a step.
        every: steps between timelines, and the first three; 0: none.
        faults: labels of fault records, four seconds apart.
        name: the job's.
        state: how it ended; unless SUCCEEDED, rank 1 of the last site was killed.
        reason: why so.
        seed: of what is drawn.
        job_overrides: each --set of the job.
    """
    text = topology or topology_yaml()
    folder, is_new = claim_run_folder(home, run_id, job_yaml())
    assert is_new
    (folder.path / TOPOLOGY).write_text(text, encoding="utf-8")
    described = load_topology(text, TOPOLOGY)
    renamed = {site.name: given for site, given in zip(described.sites, sites, strict=True)}
    links = [
        dataclasses.replace(link, ends=(renamed[link.source], renamed[link.target]))
        for link in described.links
    ]
    _journal(folder, name, sites, links, state, reason, job_overrides)
    pairs = [(link.source, link.target) for link in links]
    records = [
        *(_machine(site) for site in sites),
        *_steps(sites, steps, random.Random(seed)),
        *_links(pairs, steps),
        *(each for step in _kept(steps, every) for each in _timeline(sites, step, buckets)),
        *(_fault(at, labels) for at, labels in enumerate(faults)),
    ]
    RunFiles(folder.path).append_metrics(records)
    return folder


def append_line(folder: RunFolder, line: str) -> None:
    """Add one line, whatever it is, to metrics.jsonl."""
    with (folder.path / METRICS).open("a", encoding="utf-8") as file:
        file.write(line)


def metric(
    site: str, kind: str, step: int, wall_s: float, values: Mapping[str, float], **labels: str
) -> Record:
    """Return one line of metrics.jsonl."""
    return {
        "run": "r1",
        "generation": 1,
        "site": site,
        "kind": kind,
        "rank": 0,
        "step": step,
        "values": dict(values),
        "labels": labels,
        "wall_s": wall_s,
    }


def _journal(
    folder: RunFolder,
    name: str,
    sites: tuple[str, ...],
    links: list[Link],
    state: str,
    reason: str,
    job_overrides: tuple[str, ...],
) -> None:
    journal = Journal(folder.path)
    generation = journal.raise_generation()

    def append(kind: str, at_s: float, site: str = "", **detail: object) -> None:
        journal.append(
            kind,
            wall_s=at_s,
            generation=generation,
            run_id=folder.run_id,
            site=site,
            detail=detail,
        )

    shapes = [
        {
            "source": link.source,
            "target": link.target,
            "bytes_per_s": link.bytes_per_s,
            "rtt_s": link.rtt_s,
            "egress_usd_per_byte": link.egress_usd_per_byte,
        }
        for link in links
    ]
    append(
        "run.submitted",
        BEGAN_S,
        name="hello-wan",
        folder=str(folder.path),
        sites=sites,
        links=shapes,
        job_overrides=job_overrides,
    )
    for site in sites:
        append("site.joined", BEGAN_S + 1, site, host="here")
    append("wan.fallback", BEGAN_S + 1, note="emulating with the relay: no namespaces here")
    append("wan.emulated", BEGAN_S + 1, emulator="relay")
    append("run.active", ACTIVE_S)
    progress = {"totals": {"verified_steps": 5.0}, "active_s": 20.0}
    journal.save_progress(folder.run_id, progress)
    code = "" if state == "SUCCEEDED" else "RANK_KILLED"
    failure = None
    if code:
        append("run.stopping", ACTIVE_S + 12.0, reason="it has failed")
        failure = {
            "code": code,
            "message": reason,
            "site": sites[-1],
            "node": 0,
            "rank": 1,
            "exit_code": -9,
            "log_path": "/logs/rank1.log",
            "reported_by": sites[-1],
            "collateral": False,
        }
    append(
        "run.ended", ACTIVE_S + 20.0, state=state, reason_code=code, reason=reason, failure=failure
    )
    journal.close()


def _machine(site: str) -> Record:
    """Return what a site's first rank says of its machine, whose names are long."""
    labels = {
        "host": f"{site[:20]}-node-0.cluster.example.org",
        "device": "NVIDIA H100 80GB HBM3",
        "cpu": "AMD EPYC 9654 96-Core Processor",
        "cores": "192",
        "python": "3.12.8",
        "torch": "2.9.1+cu128",
        "build": "0.1.0",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "changed": "1",
    }
    return metric(site, "machine", 0, ACTIVE_S, {}, **labels)


def _steps(sites: tuple[str, ...], steps: int, chance: random.Random) -> Iterator[Record]:
    for step in range(1, steps + 1):
        wall_s = ACTIVE_S + step * STEP_S
        for site in sites:
            exposed_s = 0.05 + 0.03 * chance.random()
            wait_s = 0.02 + 0.02 * chance.random()
            yield metric(
                site,
                "step",
                step,
                wall_s,
                {
                    "loss": 2.2 + 3.0 * 0.93**step + 0.05 * chance.random(),
                    "tokens": 6144.0,
                    "site_tokens": 6144.0 / len(sites),
                    "step_s": STEP_S,
                    "compute_s": STEP_S - 0.008 - exposed_s - wait_s,
                    "intra_s": 0.008,
                    "exposed_inter_s": exposed_s,
                    "wait_s": wait_s,
                    "hidden_inter_s": 0.16,
                    "encode_s": 0.01,
                    "decode_s": 0.02,
                    "raw_bytes": 3.3e6,
                    "wire_bytes": 1.2e6,
                },
            )
        if step % 10 == 0:
            values = {"held_out_loss": 2.3 + 2.9 * 0.93**step, "unigram_entropy": 3.2532}
            yield metric(sites[0], "evaluation", step, wall_s, values)


def _links(pairs: list[tuple[str, str]], steps: int) -> Iterator[Record]:
    """Yield totals each half second; the last pair and its way back carry nothing."""
    used = pairs[:-2] if len(pairs) > 2 else pairs
    for tick in range(int(steps * STEP_S * 2) + 1):
        for index, (source, target) in enumerate(used):
            sent_bytes = tick * 1.5e6 * (1 + index)
            busy_s = tick * 0.2
            values = {
                "sent_bytes": sent_bytes,
                "sent_frames": float(tick * 20),
                "busy_s": busy_s,
                "raw_bytes": sent_bytes * 2.85,
            }
            if busy_s:
                values |= {"throughput_bytes_per_s": sent_bytes / busy_s, "rtt_s": 0.0623}
            wall_s = ACTIVE_S + tick / 2
            queue = {"lost_packets": float(tick), "dropped_packets": 0.0, "queued_bytes": 1e4}
            ends = {"source": source, "target": target}
            yield {**metric("", "emulated_link", -1, wall_s, queue), "labels": ends}
            yield metric(
                source, "link", 0, wall_s, values, source=source, target=target, gateway="0"
            )


def _kept(steps: int, every: int) -> list[int]:
    return [step for step in range(1, steps + 1) if every and (step <= 3 or step % every == 0)]


def _timeline(sites: tuple[str, ...], step: int, buckets: int) -> Iterator[Record]:
    for place, site in enumerate(sites):
        begin_s = ACTIVE_S + (step - 1) * STEP_S + 0.004 * place
        computed_s = begin_s + 0.3
        finished_s = computed_s
        for bucket in range(buckets):
            submitted_s = begin_s + 0.1 + 0.2 * (bucket + 1) / buckets
            posted_s = submitted_s + 0.004
            reduced_s = max(posted_s + 0.055, finished_s - 0.01) + 0.003 * place
            finished_s = reduced_s + 0.005
            values = {
                "bucket": float(bucket),
                "submitted_s": submitted_s,
                "posted_s": posted_s,
                "reduced_s": reduced_s,
                "finished_s": finished_s,
                "raw_bytes": 1048576.0,
                "wire_bytes": 368000.0,
                "wait_s": 0.004,
                "encode_s": 0.002,
                "decode_s": 0.003,
            }
            yield metric(site, "bucket", step, finished_s, values)
        end_s = max(computed_s, finished_s) + 0.012
        times = {"begin_s": begin_s, "computed_s": computed_s, "end_s": end_s}
        yield metric(site, "timeline", step, end_s, times)


def _fault(index: int, labels: Mapping[str, str]) -> Record:
    values = {"at_s": 4.0 * (index + 1)}
    if labels["what"] == "shape":
        values |= {"bytes_per_s": 1.25e6, "delay_s": 0.04}
    return {**metric("", "fault", 0, ACTIVE_S + values["at_s"], values), "labels": dict(labels)}
