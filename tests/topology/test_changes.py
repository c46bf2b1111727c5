"""Changes of an emulation and pauses of sites: they survive JSON, and what is none is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.errors import ConfigError
from topology.faults.script import Change, Pause

FIGURES = st.dictionaries(
    st.sampled_from(("bytes_per_s", "delay_s", "jitter_s", "loss")),
    st.sampled_from((0.25, 0.5)),
    min_size=1,
)
CHANGES = st.one_of(
    st.builds(
        Change,
        kind=st.sampled_from(("cut", "heal", "reset", "half_open")),
        source=st.just("a"),
        target=st.just("b"),
    ),
    FIGURES.map(lambda figures: Change(kind="shape", source="a", target="b", **figures)),
)


@given(CHANGES)
def test_a_change_survives_json(change: Change) -> None:
    assert Change.from_json(json.loads(json.dumps(change.to_json()))) == change
    assert str(change).startswith("a -> b: ")


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_pause_survives_json(is_paused: bool) -> None:
    pause = Pause(site="a", is_paused=is_paused)
    assert Pause.from_json(json.loads(json.dumps(pause.to_json()))) == pause


SHAPE = {"kind": "shape", "source": "a", "target": "b"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (7, "change: want an object, got 7"),
        ({**SHAPE, "rate": 1}, "change: unknown key 'rate'; want kind, source, target"),
        ({"kind": "cut", "source": "a"}, "change: target is missing"),
        ({"kind": "cut", "source": "a", "target": 5}, "change.target: want a text, got 5"),
        ({**SHAPE, "kind": "bend"}, "change.kind: want one of shape, cut, heal"),
        ({**SHAPE, "target": "a"}, "change.target: want another site"),
        (SHAPE, "change.shape: want at least one of bytes_per_s"),
        ({**SHAPE, "kind": "cut", "loss": 0.5}, "change.cut: want none of bytes_per_s"),
        ({**SHAPE, "loss": 1.5}, "change.loss: want 0 to 1, got 1.5"),
        ({**SHAPE, "loss": True}, "change.loss: want a number, got True"),
        ({**SHAPE, "delay_s": -1}, "change.delay_s: want 0 or more"),
        ({**SHAPE, "bytes_per_s": 0}, "change.bytes_per_s: want more than 0"),
        ({**SHAPE, "bytes_per_s": float("nan")}, "change.bytes_per_s: want more than 0"),
        ({**SHAPE, "bytes_per_s": 10**400}, "change: a number is too large"),
    ],
)
def test_what_is_no_change_is_told(wrong: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Change.from_json(wrong)
    assert message in str(raised.value)


def test_what_is_no_pause_is_told() -> None:
    with pytest.raises(ConfigError, match="want pause or resume"):
        Pause.from_json({"kind": "stop", "site": "a"})


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_emulator_imports_changes_without_waiting_for_pydantic() -> None:
    code = "import sys, topology.faults.script; print('pydantic' in sys.modules, 'yaml' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False False"
