"""Fuzz a decoder, guided by coverage: whatever bytes come, it decodes or refuses them.

Usage: python scripts/fuzz.py TARGET [TARGET ...] [--seconds 60] [--seed 1]
       python scripts/fuzz.py --list | --make-corpus | --replay TARGET FILE

Needs atheris: .venv/bin/pip install -e .[fuzz]. What crashes a decoder is kept in its folder of the
corpus, tests/fuzz/corpus/TARGET, where the tests find it. tests/fuzz/targets.py lists the decoders.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

INPUT_BYTES_MAX = 4096
_OURS = ("isthmus",)
_MEASURED = 16
"""The memory of one input in so many is measured."""


def main(argv: list[str]) -> int:
    """Do what the usage says; 1 when a decoder crashed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--make-corpus", action="store_true")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args(argv)
    logging.disable()  # some decoders log what they refuse
    if wanted.into is not None:
        _fuzz(wanted.targets[0], wanted.seconds, wanted.seed, wanted.into)
    if wanted.targets and wanted.replay is None:
        return _fuzz_each(wanted.targets, wanted.seconds, wanted.seed)
    from tests.fuzz.inputs import write_samples
    from tests.fuzz.target import attempt
    from tests.fuzz.targets import TARGETS

    if wanted.make_corpus:
        for target in TARGETS.values():
            print(f"{target.name}: {write_samples(target)} samples")
    elif wanted.replay is not None:
        print(attempt(TARGETS[wanted.targets[0]], wanted.replay.read_bytes()) or "taken")
    else:
        print("\n".join(TARGETS))
    return 0


def _fuzz_each(names: list[str], seconds: int, seed: int) -> int:
    """Fuzz in a process each: libFuzzer never returns, and leaves its files to who started it."""
    crashed = []
    for name in names:
        command = [sys.executable, __file__, name, "--seconds", str(seconds), "--seed", str(seed)]
        with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-") as into:
            done = subprocess.run(
                [*command, "--into", into], check=False, capture_output=True, text=True
            )
            _keep_slow(name, Path(into))
        last = [each for each in done.stderr.splitlines() if "DONE" in each or "Error" in each]
        print(f"{name}: {'crashed' if done.returncode else 'held'}: {' | '.join(last[-3:])}")
        if done.returncode:
            crashed.append(name)
            print(done.stdout + done.stderr)
    print(f"crashed: {', '.join(crashed)}" if crashed else "nothing crashed")
    return 1 if crashed else 0


def _keep_slow(name: str, into: Path) -> None:
    """Keep what libFuzzer itself gave up on, for time or memory; crashes have been kept."""
    from tests.fuzz.inputs import write_crasher
    from tests.fuzz.targets import TARGETS

    for path in (*into.glob("timeout-*"), *into.glob("oom-*")):
        print(f"{path.name}: kept as {write_crasher(TARGETS[name], path.read_bytes())}")


def _fuzz(name: str, seconds: int, seed: int, into: Path) -> None:
    """Fuzz one target; ends the process.

    Args:
        name: the target's.
        seconds: for how long.
        seed: of the mutations.
        into: a folder for what is found.
    """
    try:
        import atheris
    except ImportError:
        sys.exit("fuzz: atheris is not there: .venv/bin/pip install -e .[fuzz]")
    with atheris.instrument_imports(include=list(_OURS)):
        from tests.fuzz.inputs import folder_of, read_corpus, write_crasher
        from tests.fuzz.mutations import mutated
        from tests.fuzz.target import attempt, peak_bytes
        from tests.fuzz.targets import TARGETS
    if name not in TARGETS:
        sys.exit(f"fuzz: there is no target {name!r}: see --list")
    target = TARGETS[name]
    inputs = list(read_corpus(target).values())
    count = 0

    def one_input(data: bytes) -> None:
        nonlocal count
        count += 1
        try:
            attempt(target, data)
            if count % _MEASURED == 0:
                tracemalloc.start()
                taken = peak_bytes(target, data)
                tracemalloc.stop()
                assert taken <= target.most_bytes(data), f"{taken} bytes of memory"
        except BaseException:
            path = write_crasher(target, data)
            print(f"kept as {path.relative_to(ROOT)}; again with", file=sys.stderr)
            print(f"  python scripts/fuzz.py {name} --replay {path}", file=sys.stderr)
            raise

    def mutate(data: bytes, most_bytes: int, number: int) -> bytes:
        chance = random.Random(number)  # noqa: S311 - not a secret
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, most_bytes))
        return mutated(bytes(data), inputs, chance)[:most_bytes]

    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-artifact_prefix={into}{os.sep}",
        "-rss_limit_mb=2048",
        "-timeout=60",
    ]
    for data in inputs:
        attempt(target, data)  # caches and scratch memory are filled
    arguments = [sys.argv[0], str(into), str(folder_of(target)), *options]
    atheris.Setup(arguments, one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
