"""A site fails on the way: the others go on, lose no step, and end with the same bits."""

import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from isthmus.protos.catalogue import ExitCode
from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, kill, topology_yaml

pytestmark = [
    *(UNDER_BOTH_SECURITIES, pytest.mark.multiprocess, pytest.mark.slow),
    pytest.mark.exhaustive,  # test_dashboard_run.py has a site that fails, and comes back
]

DETECT_S = 5.0
STEPS = 40
LAST_ROUND = Path(__file__).parent / "scripts" / "user_last_round.py"


def victim(run: Bench, role: str) -> int:
    """Return the process of site c to kill."""
    agent = run.pids("isthmus.sites.agent", "--site c")[0]
    if role == "agent":
        return agent
    words = {"gateway": "isthmus.sites.gateway", "torchrun": "isthmus.sites.node.launcher"}
    if role in words:
        return run.children(agent, words[role])[0]
    return run.children(agent, "isthmus.sites.node.rank")[-1]


def steps_of(run: Bench, site: str) -> list[int]:
    return [
        each["step"] for each in run.metrics() if each["kind"] == "step" and each["site"] == site
    ]


def is_training(run: Bench, steps: int) -> bool:
    folders = list((run.home / "runs").glob("*/metrics.jsonl"))
    return bool(folders) and folders[0].read_text().count('"kind": "step"') > 3 * steps


@pytest.mark.parametrize(
    ("role", "tree"),
    [
        ("gateway", "star"),
        ("gateway", "gather"),
        ("rank", "auto"),
        ("torchrun", "auto"),
        ("agent", "auto"),
    ],
)
def test_the_others_go_on_and_end_alike(run: Bench, role: str, tree: str) -> None:
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 2 if role == "rank" else 1)],
        rtt="2ms",
        detect_within=f"{DETECT_S:g}s",
        min_sites=1,
        max_restarts=0,
    )
    job = run.write(topology, job_yaml(steps=STEPS, tree=tree, codec="int8"))
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))

    kill(victim(run, role))
    killed_s = time.monotonic()
    before = max(steps_of(run, "a"))
    run.wait_for("a further step", lambda: max(steps_of(run, "a")) > before + 2, 60)
    stalled_s = time.monotonic() - killed_s
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.WITH_LOSSES, f"{out}\n{err}\n{run.logs()}"
    assert stalled_s < DETECT_S, f"{stalled_s:.1f} s"

    assert told(run) == ["epoch.proposed", "epoch.begun", "site.lost"]
    check_the_end(run, "ab")


@pytest.mark.parametrize(
    ("fault", "survivors"), [("partition: [[a, b], [c]]", "ab"), ("cut: [a, b]", "abc")]
)
def test_what_is_not_reached_is_gone_around_or_dropped(
    run: Bench, fault: str, survivors: str
) -> None:
    """The fault comes after all sites' first step, and before the last: a step takes 35 ms or more.

    Before the first one a failure ends the run.
    """
    steps = 400
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)],
        rtt="50ms",
        detect_within=f"{DETECT_S:g}s",
        min_sites=1,
        max_restarts=0,
    )
    job = run.write(topology, job_yaml(steps=steps, codec="int8"))
    faults = run.folder / "faults.yaml"
    faults.write_text(f"version: 1\nseed: 1\nfaults:\n  - {{at: 10s, {fault}}}\n")
    done = run.isthmus("launch", str(job), "--json", "--faults", str(faults))
    done.check(ExitCode.OK if survivors == "abc" else ExitCode.WITH_LOSSES)
    assert done.envelope["data"]["state"] == "SUCCEEDED"
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    at_s = {each["kind"]: each["wall_s"] for each in reversed(events)}
    assert at_s["epoch.begun"] - at_s["wan.fault"] < 2 * DETECT_S
    lost = [each["site"] for each in events if each["kind"] == "site.lost"]
    assert lost == sorted(set("abc") - set(survivors))
    check_the_end(run, survivors, steps)


def test_a_site_fails_in_the_last_round_after_another_was_done_with_it(run: Bench) -> None:
    """Site a has all of the last round when c, which passes it on to b, is killed.

    While b takes nothing, c may make as many results for it as the links are said to hold: all of
    them, or else a would have to wait, too.
    """
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)],
        emulate=False,
        detect_within="15s",
        min_sites=1,
        bandwidth="10Gbit/s",
        rtt="40ms",
    )
    text = job_yaml(entrypoint=str(LAST_ROUND), tree="star, hub: c")
    job = run.write(topology, text + f"arguments: ['{run.folder}']\n")
    process = run.start("launch", str(job), "--json")

    def has_sent() -> bool:
        """Whether b has posted its last part, and nothing of it is left to be acknowledged."""
        posts = run.folder / "b.posts"
        links = [
            each
            for each in (run.metrics() if posts.exists() else [])
            if each["kind"] == "link"
            and (each["labels"]["source"], each["labels"]["target"]) == ("b", "c")
        ]
        sent = [each["values"]["sent_bytes"] for each in links]
        before = [each for each in links if each["wall_s"] < posts.stat().st_mtime]
        since = sent[len(before) :]
        return len(since) > 4 and max(sent[: len(before)], default=0) < since[-4] == since[-1]

    run.wait_for("b's part", has_sent)
    (agent,) = run.pids("isthmus.sites.agent", "--site b")
    gateway = psutil.Process(run.children(agent, "isthmus.sites.gateway")[0])
    gateway.suspend()
    (run.folder / "go").touch()
    run.wait_for("site a", (run.folder / "a.hash").exists)
    kill(victim(run, "gateway"))
    gateway.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.WITH_LOSSES, f"{out}\n{err}\n{run.logs()}"
    hashes = [(run.folder / f"{site}.hash").read_text() for site in "ab"]
    assert hashes[0] == hashes[1]
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["state"] == "SUCCEEDED"
    assert "sites lost on the way: c" in status["notes"]
    run.wait_for_nothing_left(DETECT_S)


def told(run: Bench) -> list[str]:
    """Return what the journal says of changes of members."""
    kinds = {"epoch.proposed", "epoch.begun", "site.lost"}
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    return [each["kind"] for each in events if each["kind"] in kinds]


def check_the_end(run: Bench, survivors: str, steps: int = STEPS) -> None:
    """No step was lost or done twice, all that are left have the same bits, nothing runs on."""
    for site in survivors:
        assert Counter(steps_of(run, site)) == Counter(range(1, steps + 1)), site
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["state"] == "SUCCEEDED"
    lost = sorted(set("abc") - set(survivors))
    assert [each["site"] for each in status["sites"] if each["state"] == "LOST"] == lost
    assert (f"sites lost on the way: {', '.join(lost)}" in status["notes"]) is bool(lost)
    # Hashes of all that were left were compared after every step, and equal.
    assert status["totals"]["verified_steps"] >= steps - 5
    run.wait_for_nothing_left(DETECT_S)
