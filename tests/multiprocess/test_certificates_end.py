"""Real runs over mutual TLS while certificates end, or their authority is changed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.certificates import issue
from isthmus.orchestrator.coordinator.journal import JournalReader
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from tests.multiprocess.harness import MTLS, Bench, bench, job_yaml, topology_yaml

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(400),
]

SITES = [(1, 1), (1, 1)]
NAMES = [f"{site}.{role}" for site in "ab" for role in ("agent", "gateway")]
LASTS_S = 60.0
"""Enough for a start on a busy machine."""
DETECT_S = 5.0


@contextmanager
def going_on(run: Bench, resets_at_s: Sequence[int]) -> Iterator[None]:
    """Launch a run without an end; all connections between its sites are reset at these times."""
    text = topology_yaml(SITES, detect_within=f"{DETECT_S:g}s", min_sites=2, max_restarts=0)
    job = run.write(text, job_yaml(steps=1_000_000))
    faults = run.folder / "faults.yaml"
    resets = "".join(f"  - {{at: {at_s}s, reset: [a, b]}}\n" for at_s in resets_at_s)
    faults.write_text(f"version: 1\nseed: 1\nfaults:\n{resets}")
    launched = run.start("launch", str(job), "--faults", str(faults), "--run-id", "r")
    run.wait_for("steps", lambda: (run.run_folder("r") / "metrics.jsonl").exists())
    run.wait_for("more steps", lambda: steps(run) > 3)
    yield
    assert not told(run, "site.lost"), run.logs()
    logs = [path.read_text(errors="replace") for path in run.folder.rglob("*.log")]
    assert not [each for each in logs if "Traceback" in each]
    run.isthmus("cancel", "r").check()
    launched.communicate(timeout=60)
    run.wait_for_nothing_left(30)


def told(run: Bench, kind: str) -> list[RecordedEvent]:
    with JournalReader(run.run_folder("r")) as journal:
        return [each for each in journal.events("r") if each.kind == kind]


def steps(run: Bench) -> int:
    return max((each["step"] for each in run.metrics("r") if each["kind"] == "step"), default=0)


def status(run: Bench) -> dict[str, Any]:
    found: dict[str, Any] = run.isthmus("status", "r", "--json").check().envelope["data"]
    return found


def wait_for_more_steps(run: Bench) -> None:
    before = steps(run)
    run.wait_for("further steps", lambda: steps(run) > before + 20)


def test_certificates_that_end_in_mid_run_cost_no_site(tmp_path: Path) -> None:
    """All of both sites'; then every connection breaks. Renewed, they go on where they were."""
    with bench(tmp_path, MTLS) as run:
        run.write(topology_yaml(SITES), job_yaml())
        for name in NAMES:
            issue(run.folder / "certs", name, LASTS_S / 86_400, replace=True)
        with going_on(run, range(10, 400, 5)):
            assert status(run)["certificates"].keys() == {"coordinator", *NAMES}
            expired = {*NAMES}
            run.wait_for(
                "what is told of them",
                lambda: (
                    {e.detail["certificate"] for e in told(run, "certificate.expired")} == expired
                ),
            )
            shown = run.isthmus("status", "r").check().out
            assert "has expired" in shown
            num_faults = len(told(run, "wan.fault"))
            run.wait_for("faults", lambda: len(told(run, "wan.fault")) >= num_faults + 3)
            at_rest, since_s = steps(run), time.monotonic()
            # Longer than detect_within and ride_out together, in which no step was taken.
            run.wait_for("a while", lambda: time.monotonic() > since_s + 4 * DETECT_S)
            assert steps(run) <= at_rest + 1
            found = status(run)
            assert (found["state"], found["members"]) == ("ACTIVE", ["a", "b"]), run.logs()
            renewed = run.isthmus("certs", "renew", *NAMES, "--folder", str(run.folder / "certs"))
            renewed.check()
            wait_for_more_steps(run)
            run.wait_for("what was renewed", lambda: len(told(run, "certificate.valid")) > 4)


def test_the_authority_is_changed_while_a_run_goes_on(tmp_path: Path) -> None:
    """Connections break all the while, so that each of the three steps is used."""
    with bench(tmp_path, MTLS) as run:
        certs = ("--folder", str(run.folder / "certs"))
        with going_on(run, range(20, 300, 4)):
            run.isthmus("certs", "rotate", *certs).check()
            wait_for_more_steps(run)
            early = run.isthmus("certs", "rotate", "--finish", *certs)
            assert "still of a former authority" in early.check(3).err
            run.isthmus("certs", "renew", *certs).check()
            wait_for_more_steps(run)
            run.isthmus("certs", "rotate", "--finish", *certs).check()
            resets = len(told(run, "wan.fault"))
            run.wait_for("resets", lambda: len(told(run, "wan.fault")) > resets + 1)
            wait_for_more_steps(run)
            assert status(run)["state"] == "ACTIVE"
