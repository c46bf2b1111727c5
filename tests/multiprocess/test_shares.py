"""A whole run whose parts of the batch follow the sites' speeds, through all that befalls it."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.protos.checkpoint.store import checkpoint_name, checkpoints_in
from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, kill, metrics_of
from tests.multiprocess.test_coordinator_restart import Deployment
from tests.multiprocess.test_lost_site import victim
from tests.sites.test_sharded_checkpoints import everything

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(500),
]

SCRIPT = Path(__file__).parent / "scripts" / "user_shares.py"
STEPS, EVERY = 1500, 50
Records = Sequence[dict[str, Any]]


def test_shares_follow_through_a_loss_a_return_a_coordinators_end_and_a_resume(run: Bench) -> None:
    stored = run.folder / "stored"
    more = (
        f"entrypoint: {SCRIPT}\narguments: ['{STEPS}', {run.folder}/progress]\n"
        "plan: {sites: all, replan: {shares: follow, lasting: 1s}}\n"
        f"checkpoint: {{every: {EVERY} steps, keep: 99, to: {stored}}}\n"
    )
    deployed = Deployment(run, job_yaml(steps=STEPS) + more, sites=3, min_sites=1)

    def told(kind: str) -> int:
        events = deployed.isthmus("events", "one").envelope["data"]["events"]
        return sum(1 for each in events if each["kind"] == kind)

    run.wait_for("other shares", lambda: told("run.replanned") > 0, 100)
    kill(victim(run, "gateway"))
    run.wait_for("the loss", lambda: told("site.lost") > 0, 60)
    run.wait_for("the return", lambda: told("site.returned") > 0, 150)
    deployed.kill()
    deployed.start(deployed.address)
    done = deployed.isthmus("wait", "one", "--timeout", "200s")
    assert done.code == 0, f"{done.out}\n{done.err}\n{run.logs()}"
    records = [
        each for each in metrics_of(deployed.state / "runs" / "one") if each["kind"] == "step"
    ]
    by_site = {site: samples_at(records, site) for site in "abc"}
    latest = [by_site[site][STEPS] for site in "abc"]
    assert sum(latest) == 12, latest
    assert latest[0] > latest[1] > latest[2], latest

    used = samples_of(run.folder / "progress", records)
    assert len(used) == 1009, "never"
    assert max(used.values()) - min(used.values()) <= 1, "twice, or never"

    since = 1 + max(
        step for site in "abc" for step, own in by_site[site].items() if own != by_site[site][STEPS]
    )
    steps = [each.step for each in checkpoints_in(str(stored / "one"))]
    place = stored / "one" / checkpoint_name(min(each for each in steps if each >= since))
    sets = ["plan.replan.shares=fixed", f"checkpoint.resume={place}"]
    words = [word for each in sets for word in ("--set", each)]
    run.isthmus("launch", str(run.folder / "job.yaml"), "--run-id", "two", *words).check()
    whole, resumed = (everything(stored / each, STEPS) for each in ("one", "two"))
    assert not [name for name, each in whole.items() if not torch.equal(each, resumed[name])]


def samples_at(records: Records, site: str) -> dict[int, int]:
    """Return how many samples a site had in each step."""
    return {
        each["step"]: int(each["values"].get("site_samples", 0))
        for each in records
        if each["site"] == site
    }


def samples_of(progress: Path, records: Records) -> Counter[int]:
    """Return how often each sample was used: where its step has counted its site's part."""
    tokens: dict[int, float] = {}
    parts: dict[int, dict[str, float]] = {}
    for record in records:
        values = record["values"]
        tokens[record["step"]] = values["tokens"]
        parts.setdefault(record["step"], {})[record["site"]] = values["site_tokens"]
    used: Counter[int] = Counter()
    for path in progress.glob("*-0.jsonl"):
        site = path.name[0]
        for step, places in map(json.loads, path.read_text().splitlines()):
            own = parts.get(step, {}).get(site, 0.0)
            others = sum(part for name, part in parts.get(step, {}).items() if name != site)
            is_lost = not own and tokens.get(step, 0.0) - others >= len(places)
            if own or is_lost:
                used.update(places)
    return used
