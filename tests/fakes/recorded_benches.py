"""Folders of benchmarks, as bench leaves them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from isthmus.orchestrator.evidence.record.bench_record import BENCH, Failed, Sweep, write_bench
from tests.fakes import benches

SWEEPS = (
    Sweep(path="links.*.rtt", values=("5ms", "20ms", "80ms")),
    Sweep(path="links.*.bandwidth", values=("200Mbit/s", "1Gbit/s")),
    Sweep(path="codec", values=("fp32", "bf16-split")),
)


def record_bench(home: Path, name: str = "b1", *, swept: bool = True) -> Path:
    """Write a benchmark, of three RTTs, two bandwidths and two codecs, or of one setting.

    In the first setting a run has failed; the last one of a sweep has no complete repeat. Return
    its folder.
    """
    sweeps = SWEEPS if swept else ()
    settings = []
    for point in itertools.product(*(sweep.values for sweep in sweeps)):
        rtt, bandwidth, _ = point or ("20ms", "200Mbit/s", "")
        overrides = dict(zip((sweep.path for sweep in sweeps), point, strict=True))
        setting = benches.a_setting(rtt, bandwidth)
        settings.append(dataclasses.replace(setting, overrides=overrides, runs=()))
    if swept:
        settings[-1] = dataclasses.replace(settings[-1], result=None)
    failed = Failed(code="RANK_KILLED", message="rank 0 of oregon was killed by SIGKILL")
    run = dataclasses.replace(benches.a_run(2), measured=None, failed=failed)
    settings[0] = dataclasses.replace(settings[0], runs=(run,))
    question = benches.a_question(warmup_steps=3, steps=12, repeats=3, sweeps=sweeps)
    whole = benches.a_bench()
    bench = dataclasses.replace(whole, name=name, question=question, settings=tuple(settings))
    folder = home / "bench" / name
    folder.mkdir(parents=True)
    write_bench(folder / BENCH, bench)
    return folder
