"""A site that fails comes back beside the training, and all end with the same bits."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, kill, topology_yaml
from tests.multiprocess.test_lost_site import is_training, steps_of, victim

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
]

STEPS = 1500
SCRIPT_STEPS = 3000
LAYOUTS_STEPS = 1200
"""They take longer."""
SCRIPT = Path(__file__).parent / "scripts" / "user_checkpoint.py"
LAYOUTS_SCRIPT = SCRIPT.with_name("user_layouts.py")


@pytest.mark.parametrize(
    ("role", "regime"),
    [("gateway", "sync"), ("rank", "sync"), ("agent", "sync"), ("gateway", "delayed")],
)
def test_it_takes_part_again_and_no_step_is_lost(run: Bench, role: str, regime: str) -> None:
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 2)], emulate=False, detect_within="5s", min_sites=1
    )
    text = job_yaml(steps=STEPS, codec="int8") + f"regime: {regime}\n"
    if role == "rank":  # a site comes back with checkpoints as without
        text += "checkpoint: {every: 400 steps, keep: 2}\n"
    job = run.write(topology, text)
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))
    kill(victim(run, role))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"

    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    kinds = [
        each["kind"]
        for each in events
        if each["kind"] in {"site.lost", "site.returning", "site.returned"}
    ]
    assert kinds == ["site.lost", "site.returning", "site.returned"]
    for site in "ab":
        assert Counter(steps_of(run, site)) == Counter(range(1, STEPS + 1)), site
    steps = steps_of(run, "c")
    assert steps[-1] == STEPS
    assert len(set(steps)) == len(steps) < STEPS
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["state"] == "SUCCEEDED"
    # Hashes of all that took part were compared after every step, and equal.
    assert status["totals"]["verified_steps"] >= STEPS - 20
    run.wait_for_nothing_left(15.0)


@pytest.mark.parametrize("stage", ["isthmus.sites.gateway", "isthmus.sites.node.rank"])
def test_an_agent_that_is_lost_before_the_first_step_is_waited_for(run: Bench, stage: str) -> None:
    """Nothing has been trained: all sites begin again with it, and the run has all its steps."""
    steps = 60
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 2)], emulate=False, detect_within="5s", min_sites=1
    )
    process = run.start("launch", str(run.write(topology, job_yaml(steps=steps))), "--json")

    def started() -> list[int]:
        return [
            each
            for agent in run.pids("isthmus.sites.agent", "--site c")
            for each in run.children(agent, stage)
        ]

    run.wait_for(stage, lambda: bool(started()))
    kill(victim(run, "agent"))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    kinds = [each["kind"] for each in events]
    assert kinds.count("run.rolled_back") == 1
    assert kinds.index("run.rolled_back") < kinds.index("run.active")
    assert not {"site.lost", "site.returned"} & {*kinds}
    for site in "abc":
        assert steps_of(run, site) == [*range(1, steps + 1)], site
    run.wait_for_nothing_left(15.0)


@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [
        pytest.param("fsdp", 1000, id="fsdp"),  # its steps take longer
        pytest.param("ddp", SCRIPT_STEPS, id="ddp"),
        pytest.param("average", SCRIPT_STEPS, id="average"),
    ],
)
def test_a_script_of_any_kind_comes_back(run: Bench, kind: str, num_steps: int) -> None:
    """With a data loader that fetches ahead, a schedule, and a batch that has shrunk meanwhile."""
    topology = topology_yaml(
        [(1, 2), (1, 1), (1, 2)], emulate=False, detect_within="5s", min_sites=1
    )
    text = job_yaml(steps=STEPS, codec="int8")
    text += f"on_fewer_sites: shrink\nentrypoint: {SCRIPT}\n"
    job = run.write(topology, text + f"arguments: ['{num_steps}', {kind}, '0.1']\n")
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))
    kill(victim(run, "gateway"))
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    for site in "ab":
        assert Counter(steps_of(run, site)) == Counter(range(1, num_steps + 1)), site
    steps = steps_of(run, "c")
    assert steps[-1] == num_steps
    assert len(set(steps)) == len(steps) < num_steps
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["totals"]["verified_steps"] >= num_steps - 20
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    assert "site.returned" in {each["kind"] for each in events}
    rates: dict[int, set[float]] = {}
    for each in run.metrics():
        if each["kind"] == "step" and "learning_rate" in each["values"]:
            rates.setdefault(each["step"], set()).add(each["values"]["learning_rate"])
    assert all(len(found) == 1 for found in rates.values()), "the same schedule at all sites"
    run.wait_for_nothing_left(15.0)


@pytest.mark.parametrize(
    ("layouts", "after"),
    [
        pytest.param(("blocks", "rows", "tp"), "tp", id="tp"),
        pytest.param(("tp", "rows", "pp"), "pp", id="pp"),
        pytest.param(("pp", "blocks", "rows"), "rows", id="beside-a-pipeline"),
        pytest.param(("blocks", "rows", "tp"), "rows", id="in-another-layout"),
    ],
)
def test_a_site_of_any_layout_comes_back(
    run: Bench, layouts: tuple[str, str, str], after: str
) -> None:
    """It takes the order of the first site over, and all of the state whoever holds it."""
    topology = topology_yaml(
        [(1, 2), (1, 1), (1, 2)], emulate=False, detect_within="5s", min_sites=1
    )
    later = run.folder / "later"
    arguments = ", ".join([f"'{LAYOUTS_STEPS}'", str(later), *layouts])
    text = job_yaml(steps=STEPS, codec="int8")
    text += f"entrypoint: {LAYOUTS_SCRIPT}\narguments: [{arguments}]\n"
    job = run.write(topology, text)
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))
    later.write_text(after)
    kill(victim(run, "gateway"))
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    for site in "ab":
        assert Counter(steps_of(run, site)) == Counter(range(1, LAYOUTS_STEPS + 1)), site
    steps = steps_of(run, "c")
    assert steps, run.logs()
    assert steps[-1] == LAYOUTS_STEPS
    assert len(set(steps)) == len(steps) < LAYOUTS_STEPS
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["totals"]["verified_steps"] >= LAYOUTS_STEPS - 20
    run.wait_for_nothing_left(15.0)


def test_a_site_is_dropped_and_added_while_the_run_goes_on(run: Bench) -> None:
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 2)], emulate=False, detect_within="5s", min_sites=1
    )
    job = run.write(topology, job_yaml(steps=9999, codec="int8"))
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))
    run.isthmus("sites", "drop", "c", "--json").check()

    def state() -> str:
        data = run.isthmus("status", "--json").check().envelope["data"]
        return f"{data['sites'][2]['state']} {data['members']}"

    run.wait_for("the drop", lambda: state() == "DROPPED ['a', 'b']")
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    told = [each["kind"] for each in events if each["kind"].startswith(("epoch.", "site."))]
    asked = told.index("site.drop_requested")
    expected = ["epoch.proposed", "epoch.begun", "site.ended", "site.dropped"]
    assert [kind for kind in told[asked + 1 :] if kind != "site.resumed"] == expected
    assert "site c was dropped from the run, and has had its last round" in run.logs()
    # All that it has computed counts, and nothing was done again.
    last = max(steps_of(run, "c"))
    assert steps_of(run, "c") == [*range(1, last + 1)]
    run.isthmus("sites", "add", "c", "--json").check()
    run.wait_for("the return", lambda: state() == "RUNNING ['a', 'b', 'c']", 60)
    run.isthmus("cancel", "--json").check()
    process.communicate(timeout=60)
    for site in "ab":
        steps = steps_of(run, site)
        assert steps == [*range(1, len(steps) + 1)], site
    run.wait_for_nothing_left(15.0)


def test_a_site_that_the_run_did_not_begin_with_is_added(run: Bench) -> None:
    """It has another number of ranks, and comes before the others in the topology."""
    topology = topology_yaml(
        [(1, 2), (1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1
    )
    text = job_yaml(steps=STEPS, codec="int8") + "begin_with: [b, c]\n"
    text += f"on_fewer_sites: shrink\nentrypoint: {SCRIPT}\n"
    job = run.write(topology, text + f"arguments: ['{SCRIPT_STEPS}', ddp, '0.1']\n")
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["members"] == ["b", "c"]
    assert {each["site"]: each["state"] for each in status["sites"]}["a"] == "JOINED"
    refused = run.isthmus("sites", "drop", "a", "--json")
    assert "site a takes no part yet" in refused.err + refused.out
    run.isthmus("sites", "add", "a", "--json").check()
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    every = range(1, SCRIPT_STEPS + 1)
    for site in "bc":
        assert Counter(steps_of(run, site)) == Counter(every), site
    steps = steps_of(run, "a")
    assert steps, run.logs()
    assert steps[-1] == SCRIPT_STEPS
    assert len(set(steps)) == len(steps) < SCRIPT_STEPS
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["members"] == ["b", "c", "a"]
    assert status["totals"]["verified_steps"] >= SCRIPT_STEPS - 20
    tokens: Counter[int] = Counter()
    shares = Counter[str]()
    for each in run.metrics():
        if each["kind"] == "step":
            tokens[each["step"]] += each["values"]["site_tokens"]
            if each["step"] == SCRIPT_STEPS:
                shares[each["site"]] = each["values"]["site_tokens"]
    assert (tokens[1], tokens[SCRIPT_STEPS]) == (12, 12), "the whole batch, whoever takes part"
    assert shares == {"a": 6, "b": 3, "c": 3}
    run.wait_for_nothing_left(15.0)


def test_under_a_relay_a_site_is_added_and_comes_back(run: Bench) -> None:
    """Its gateways have other ports each time, to which the relay leads."""
    topology = topology_yaml([(1, 1), (1, 1), (1, 1)], detect_within="5s", min_sites=1)
    job = run.write(topology, job_yaml(steps=9999, codec="int8") + "begin_with: [a, b]\n")
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))

    def status() -> dict[str, Any]:
        data: dict[str, Any] = run.isthmus("status", "--json").check().envelope["data"]
        return data

    def has_returned(times: int) -> bool:
        events = run.isthmus("events", "--json").check().envelope["data"]["events"]
        return [each["kind"] for each in events].count("site.returned") == times

    run.isthmus("sites", "add", "c", "--json").check()
    run.wait_for("the new site", lambda: has_returned(1), 60)
    kill(victim(run, "gateway"))
    run.wait_for("the return", lambda: has_returned(2), 60)
    assert status()["members"] == ["a", "b", "c"]
    # Hashes of all that take part are compared after every step, and are equal.
    verified = status()["totals"]["verified_steps"]
    run.wait_for("steps with it", lambda: status()["totals"]["verified_steps"] >= verified + 20)
    run.isthmus("cancel", "--json").check()
    process.communicate(timeout=60)
    assert status()["state"] == "CANCELLED", run.logs()
    for site in "ab":
        steps = steps_of(run, site)
        assert steps == [*range(1, len(steps) + 1)], site
    run.wait_for_nothing_left(15.0)
