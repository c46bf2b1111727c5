"""Who ends a site leaves it the time for a last checkpoint, and more to end."""

from __future__ import annotations

import pytest

from isthmus.orchestrator.launchers import keeper, slurm
from isthmus.protos.save_time import (
    LEAVE_S,
    SAVE_WITHIN,
    SAVE_WITHIN_S,
    SaveTimeError,
    save_within_s,
)

ENDS_WITHIN_S = 10.0
"""An agent that has its checkpoint: graces of ranks and gateways, logs, a leave."""


def test_the_environment_says_how_long_a_last_checkpoint_may_take() -> None:
    assert save_within_s({}) == SAVE_WITHIN_S
    assert save_within_s({SAVE_WITHIN: ""}, 40.0) == 40.0
    assert save_within_s({SAVE_WITHIN: "0"}) == 0.0
    assert save_within_s({SAVE_WITHIN: "90.5"}, 40.0) == 90.5


@pytest.mark.parametrize("given", ["soon", "-1", "nan", "inf", "20s"])
def test_what_is_no_time_is_refused(given: str) -> None:
    with pytest.raises(SaveTimeError, match=SAVE_WITHIN):
        save_within_s({SAVE_WITHIN: given})


def test_nobody_kills_an_agent_before_it_can_have_ended() -> None:
    assert LEAVE_S > ENDS_WITHIN_S, "a tether, a pod and a node's server wait for so much longer"
    assert keeper.END_S > SAVE_WITHIN_S + LEAVE_S, "the keeper outlasts the tether"
    assert slurm.SAVE_S + LEAVE_S < slurm.SIGNAL_S
