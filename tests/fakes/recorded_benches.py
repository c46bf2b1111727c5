"""Folders of benchmarks, as bench leaves them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from isthmus.orchestrator.evidence.record.bench_record import (
    BENCH,
    Bench,
    Failed,
    LinkUse,
    Predicted,
    Result,
    Run,
    Setting,
    SiteSpeed,
    Source,
    Split,
    Sweep,
    interval,
    write_bench,
)
from isthmus.orchestrator.run_folder.home import JOB, TOPOLOGY
from tests.fakes.benches import a_question
from tests.fakes.recorded_runs import SITES


def record_bench(home: Path, name: str = "b1", *, swept: bool = True) -> Path:
    """Write a benchmark, of three RTTs, two bandwidths and two codecs, or of one setting.

    Return its folder.
    """
    sweeps = (
        Sweep(path="links.*.rtt", values=("5ms", "20ms", "80ms")),
        Sweep(path="links.*.bandwidth", values=("200Mbit/s", "1Gbit/s")),
        Sweep(path="codec", values=("fp32", "bf16-split")),
    )
    points: list[dict[str, str]] = [{}]
    for sweep in sweeps if swept else ():
        points = [{**point, sweep.path: value} for point in points for value in sweep.values]
    settings = [_setting(point, index) for index, point in enumerate(points)]
    if swept:
        settings[-1] = dataclasses.replace(settings[-1], result=None)
    bench = Bench(
        name=name,
        job=Source(name="hello-wan", path=JOB),
        topology=Source(name="three-coasts", path=TOPOLOGY),
        question=a_question(warmup_steps=3, steps=12, repeats=3, sweeps=sweeps if swept else ()),
        settings=tuple(settings),
    )
    folder = home / "bench" / name
    folder.mkdir(parents=True)
    write_bench(folder / BENCH, bench)
    return folder


def _setting(overrides: dict[str, str], index: int) -> Setting:
    rtt_s = {"5ms": 0.005, "20ms": 0.02, "80ms": 0.08}[overrides.get("links.*.rtt", "20ms")]
    bytes_per_s = 125e6 if overrides.get("links.*.bandwidth") == "1Gbit/s" else 25e6
    ratio = 1.0 if overrides.get("codec") == "fp32" else 0.35
    exposed_s = rtt_s + ratio * 3.3e6 / bytes_per_s
    compute_s = 0.5
    step_s = compute_s + exposed_s + 0.01
    mean = compute_s / step_s
    predicted_s = compute_s + exposed_s
    split = Split(
        compute_s=compute_s,
        intra_s=0.004,
        exposed_inter_s=exposed_s,
        wait_s=0.006,
        hidden_inter_s=0.1,
        encode_s=0.01,
        decode_s=0.02,
    )
    result = Result(
        compute="modelled",
        schedule="overlap",
        emulator="relay",
        efficiency=interval([mean - 0.004, mean, mean + 0.004]),
        tokens_per_s=interval([mean * 15000.0] * 3),
        solo=tuple(SiteSpeed(site=site, tokens_per_s=interval([5000.0] * 3)) for site in SITES),
        step_s=interval([step_s] * 3),
        split=split,
        shares={
            "compute": compute_s / step_s,
            "intra": 0.004 / step_s,
            "exposed_inter": exposed_s / step_s,
            "wait": 0.006 / step_s,
        },
        links=(
            LinkUse(
                source="oregon",
                target="virginia",
                bytes_per_s=bytes_per_s,
                rtt_s=rtt_s,
                loss=0.0,
                bytes_per_step=ratio * 3.3e6,
                utilisation=0.4,
                egress_usd_per_step=1e-5,
                egress_usd_per_1e9_tokens=12.5,
            ),
        ),
        predicted=Predicted(
            compute_s=compute_s,
            exchange_s=exposed_s,
            step_s=predicted_s,
            efficiency=compute_s / predicted_s,
            deviation=step_s / predicted_s - 1,
        ),
    )
    failed = Run(
        kind="all",
        site=None,
        repeat=2,
        run_id=f"b1-{index}-all-2",
        folder=f"runs/b1-{index}-all-2",
        emulator="relay",
        wall_s=3.0,
        failed=Failed(code="RANK_KILLED", message="rank 0 of oregon was killed by SIGKILL"),
    )
    return Setting(overrides=overrides, runs=(failed,) if index == 0 else (), result=result)
