"""What a run promises holds whatever fails, in many runs with faults drawn from seeds.

A failure names its seed; `scripts/sim --seed N` carries that one out again.
"""

from collections import Counter

import pytest

from isthmus.protos.errors import IsthmusError
from tests.sim.simulation import MUTANTS, Simulation

NUM_SEEDS = 2000
PER_TEST = 250
FEW_SEEDS = 100
"""So many show everything once, and a run without `--all` tries no more."""
MUTANT_SEEDS = 300
EVERYTHING = (
    *("redone", "planned", "handovers", "lost", "holes", "came back", "states taken"),
    *("begun with some", "added", "behind"),
    *(
        "ready while others settle",
        "left",
        "done",
        "cancelled",
        "failed",
        "not begun",
        "done with losses",
        "script failed",
        "computed wrongly",
        "kept out",
        "no first step",
    ),
    "ended early",
    "rounds of several steps",
    *("killed gateway", "killed agent", "killed machine", "sessions broken", "drops"),
    *("coordinator now", "coordinator torn", "coordinator full", "coordinator kept"),
)
"""What has to have happened in any few hundred runs, or they would show little."""
CAUGHT_BY = {
    "no_fence": 100,
    "mixed_views": 10,
    "ranges_twice": 11,
    "entry_forgotten": 62,
    "ends_at_once": 7,
    "script_goes_on": 38,
    "released_early": 7,
    "follower_stopped": 32,
    "no_chain_check": 63,
    "early_end_unseen": 7,
    "generation_not_persisted": 11,
    "drop_forgotten": 25,
    "done_forgotten": 244,
}
"""Seeds that are tried first, to save time: the first that caught a mutant, if it is a late one."""
RARE = ("forks found", "rolled back")
"""What has to have happened in the first of them: later ones may go without."""


def carry_out(seed: int, mutant: str = "") -> Counter[str]:
    try:
        return Simulation(seed, mutant).run()
    except Exception as error:
        error.add_note(
            f"{seed=}: scripts/sim --seed {seed}" + (f" --mutant {mutant}" * bool(mutant))
        )
        raise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "num_seeds"),
    [
        (0, FEW_SEEDS),
        *(
            pytest.param(first, PER_TEST, marks=pytest.mark.exhaustive)
            for first in range(0, NUM_SEEDS, PER_TEST)
        ),
    ],
)
def test_what_a_run_promises_holds_whatever_fails(first: int, num_seeds: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + num_seeds):
        counts.update(carry_out(seed))
    wanted = EVERYTHING + (RARE if first == 0 else ())
    assert all(counts[each] for each in wanted), counts


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_machine_that_breaks_a_promise_is_caught(mutant: str) -> None:
    def is_caught(seed: int) -> bool:
        try:
            carry_out(seed, mutant)
        except (AssertionError, IsthmusError):
            return True
        return False

    seeds = (CAUGHT_BY.get(mutant, 0), *range(MUTANT_SEEDS))
    assert any(is_caught(seed) for seed in seeds), mutant
