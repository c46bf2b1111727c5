"""One verdict on a run: its grade, the plan, and a remedy only where the facts speak for it."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.orchestrator.evidence.report.verdict import (
    Expected,
    Interruptions,
    SlowLink,
    SlowShare,
    VerdictFacts,
    verdict,
)


def facts(**changed: Any) -> VerdictFacts:  # noqa: ANN401 - any field
    """Return a step of a second: compute, then what `changed` says, of 100 steps."""
    parts = {"exposed_s": 0.0, "wait_s": 0.0} | changed
    compute_s = parts.pop("compute_s", 1.0 - parts["exposed_s"] - parts["wait_s"])
    step_s = compute_s + parts["exposed_s"] + parts["wait_s"]
    defaults: dict[str, Any] = {"steps": 100, "active_s": 100.0, "codec": "fp32"}
    return VerdictFacts(**{**defaults, "step_s": step_s, "compute_s": compute_s, **parts})


@pytest.mark.parametrize(
    ("exposed_s", "wait_s", "grade", "headline"),
    [
        (0.0, 0.0, "good", "Efficient: 100% of the time went into training."),
        (0.03, 0.0, "good", "Efficient: 97% of the time went into training; 3% on the WAN."),
        (0.13, 0.0, "fair", "Fair: 87% of the time went into training; 13% on the WAN."),
        (
            0.04,
            0.08,
            "fair",
            "Fair: 88% of the time went into training; 8% waiting for slower sites and 4% on the "
            "WAN.",
        ),
        (0.5, 0.0, "poor", "WAN-bound: only 50% of the time went into training; 50% on the WAN."),
        (
            0.1,
            0.3,
            "poor",
            "Held up by slow sites: only 60% of the time went into training; 30% waiting for "
            "slower sites and 10% on the WAN.",
        ),
    ],
)
def test_the_headline_says_where_the_time_went(
    exposed_s: float, wait_s: float, grade: str, headline: str
) -> None:
    found = verdict(facts(exposed_s=exposed_s, wait_s=wait_s))
    assert (found.grade, found.headline) == (grade, headline)


@pytest.mark.parametrize(
    ("changed", "headline"),
    [
        ({"steps": 0, "step_s": None}, "No step was completed."),
        ({"steps": 4}, "Too short to judge: 4 steps."),
        (
            {"state": "FAILED", "reason_code": "RANK_KILLED"},
            "Failed after 100 steps (RANK_KILLED). Efficient: 100% of the time went into training.",
        ),
        (
            {"state": "FAILED", "reason_code": "START_TIMEOUT", "steps": 0, "step_s": None},
            "Failed after 0 steps (START_TIMEOUT). No step was completed.",
        ),
        ({"state": "CANCELLED", "steps": 1}, "Cancelled after 1 step. Too short to judge: 1 step."),
    ],
)
def test_how_it_ended_comes_first(changed: dict[str, Any], headline: str) -> None:
    assert verdict(facts(**changed)).headline == headline


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"planned": Expected(step_s=0.98)}, "A step took 1s, as planned (980ms)."),
        ({"planned": Expected(step_s=0.8)}, "A step took 1s, 25% longer than the planned 800ms."),
        ({"planned": Expected(step_s=1.25)}, "A step took 1s, 20% shorter than the planned 1.25s."),
        (
            {"planned": Expected(step_s=0.4, compute_s=0.39)},
            "A step took 1s, 2.5 times the planned 400ms; most of that is compute, 1s where the "
            "topology's figures give 390ms.",
        ),
        (
            {"exposed_s": 0.6, "planned": Expected(step_s=0.4, compute_s=0.39)},
            "A step took 1s, 2.5 times the planned 400ms.",
        ),
    ],
)
def test_against_the_plan(changed: dict[str, Any], words: str) -> None:
    assert words in verdict(facts(**changed)).details


def test_interruptions_are_told() -> None:
    found = verdict(facts(interruptions=Interruptions(num_losses=1, num_stalls=2, stalled_s=12.0)))
    assert found.details == (
        "A site was lost; training stood still 2 times, for 12s (12% of the run).",
    )


LINK = SlowLink(way="a → b", delivered_bytes_per_s=1e6, described_bytes_per_s=1e7)
SLOW = SlowShare(who="site a", num_steps=60, cost_s=0.2, share=0.2)
SHARING = SlowShare(
    who="site a",
    num_steps=60,
    cost_s=0.2,
    share=0.2,
    why="sites a, b share the machine gpu17",
    shares_machine=True,
)
MODEL = {"fp32": 1.0, "bf16": 0.8, "int8": 0.79, "int4": 0.78, "topk": 0.5}


@pytest.mark.parametrize(
    ("changed", "remedy", "words"),
    [
        (
            {"wait_s": 0.3, "slow": SHARING},
            "slow site",
            "a machine for each site: sites a, b share the machine gpu17, and site a is late there",
        ),
        # Nothing is proposed where nothing is wrong, or no fact speaks for it.
        ({"exposed_s": 0.04}, "", ""),
        ({"exposed_s": 0.04, "codec_steps_s": MODEL}, "", ""),
        ({"wait_s": 0.3}, "", ""),
        ({"exposed_s": 0.3, "is_sync": False}, "", ""),
        # A slow link comes before all else.
        (
            {"exposed_s": 0.3, "slow_link": LINK, "codec_steps_s": MODEL},
            "slow link",
            "carried 8Mbit/s of the described 80Mbit/s",
        ),
        # The most exact codec among the fast ones; topk loses too much of a gradient.
        ({"exposed_s": 0.3, "codec_steps_s": MODEL}, "codec", "`codec: bf16` instead of fp32"),
        # A codec saves no more than what is exposed.
        ({"exposed_s": 0.06, "wait_s": 0.05, "codec_steps_s": MODEL}, "codec", "6% shorter"),
        # By the bytes, where the model does not know the job.
        ({"exposed_s": 0.3, "bytes_s": 0.3}, "codec", "by its bytes"),
        ({"exposed_s": 0.3, "bytes_s": 0.3, "codec": "int4-zstd"}, "micro-batches", "four times"),
        ({"exposed_s": 0.3, "bytes_s": 0.3, "codec": ""}, "micro-batches", ""),
        (
            {"exposed_s": 0.3, "bytes_s": 0.3, "codec": "int4-zstd", "link_share": 0.5},
            "link share",
            "may use 50% of it",
        ),
        # What the planner may not choose.
        (
            {"exposed_s": 0.3, "planned": Expected(
                step_s=1.0, alternatives_s={"all sites (not permitted)": 0.8, "gather": 0.7})},
            "plan",
            "to permit all sites. The planner, which may not choose it, expects a step that is 20%",
        ),
        (
            {"exposed_s": 0.3, "planned": Expected(step_s=1.0, alternatives_s={"gather": 0.7})},
            "micro-batches",
            "",
        ),
        # Latency: more compute between exchanges, if a little is enough.
        ({"exposed_s": 0.1, "wait_s": 0.06, "bytes_s": 0.01}, "micro-batches", "twice"),
        ({"exposed_s": 0.3, "bytes_s": 0.01}, "micro-batches", "about 9.7% of the time"),
        ({"exposed_s": 0.6, "bytes_s": 0.01}, "regime", "max_sync_period"),
        # Who is slow, if for long; the larger loss first.
        ({"wait_s": 0.3, "slow": SLOW}, "slow site", "it cost the others 200ms a step (20%)"),
        ({"wait_s": 0.3, "slow": SLOW, "steps": 1000}, "", ""),
        ({"exposed_s": 0.1, "wait_s": 0.3, "slow": SLOW}, "slow site", ""),
        ({"exposed_s": 0.2, "wait_s": 0.1, "slow": SLOW}, "micro-batches", ""),
        # Noticing a loss.
        (
            {"interruptions": Interruptions(
                num_losses=1, num_stalls=1, stalled_s=16.0,
                stalled_by_loss_s=16.0, detect_within_s=15.0)},
            "detection",
            "it may take 15s",
        ),
        (
            {"interruptions": Interruptions(
                num_losses=1, num_stalls=1, stalled_s=4.0,
                stalled_by_loss_s=4.0, detect_within_s=15.0)},
            "",
            "",
        ),
        (
            {"interruptions": Interruptions(
                num_losses=1, num_stalls=2, stalled_s=40.0,
                stalled_by_loss_s=10.0, detect_within_s=15.0)},
            "",
            "",
        ),
    ],
)  # fmt: skip
def test_one_remedy_where_the_facts_speak_for_it(
    changed: dict[str, Any], remedy: str, words: str
) -> None:
    found = verdict(facts(**changed))
    assert found.remedy == remedy, found
    assert words in found.advice
    assert bool(found.advice) == bool(remedy)
