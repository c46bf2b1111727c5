"""Changes of an emulation: they survive JSON, and what is none is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import read_json

FIGURES = st.dictionaries(
    st.sampled_from(("bytes_per_s", "delay_s", "jitter_s", "loss")),
    st.sampled_from((0.25, 0.5)),
    min_size=1,
)
CHANGES = st.one_of(
    st.builds(
        Change,
        kind=st.sampled_from(("cut", "heal", "reset")),
        source=st.just("a"),
        target=st.just("b"),
    ),
    FIGURES.map(lambda figures: Change(kind="shape", source="a", target="b", **figures)),
)


@given(CHANGES)
def test_a_change_survives_json(change: Change) -> None:
    assert read_json(Change, json.loads(json.dumps(change.to_json()))) == change
    assert str(change).startswith("a -> b: ")


SHAPE = {"kind": "shape", "source": "a", "target": "b"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (7, "change: want an object, got 7"),
        ({**SHAPE, "rate": 1}, "change.rate: unknown"),
        ({"kind": "cut", "source": "a"}, "change.target is missing"),
        ({"kind": "cut", "source": "a", "target": 5}, "change.target: want str, got 5"),
        ({**SHAPE, "kind": "bend"}, "change.kind: want one of shape, cut, heal"),
        ({**SHAPE, "target": "a"}, "change.target: want another site"),
        (SHAPE, "change.shape: want at least one of bytes_per_s"),
        ({**SHAPE, "kind": "cut", "loss": 0.5}, "change.cut: want none of bytes_per_s"),
        ({**SHAPE, "loss": 1.5}, "change.loss: want 0 to 1, got 1.5"),
        ({**SHAPE, "loss": True}, "change.loss: want float, got True"),
        ({**SHAPE, "delay_s": -1}, "change.delay_s: want 0 or more"),
        ({**SHAPE, "bytes_per_s": 0}, "change.bytes_per_s: want more than 0"),
        ({**SHAPE, "bytes_per_s": float("nan")}, "change.bytes_per_s: want more than 0"),
        ({**SHAPE, "bytes_per_s": 10**400}, "change.bytes_per_s: want float"),
    ],
)
def test_what_is_no_change_is_told(wrong: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_json(Change, wrong, "change")
    assert message in str(raised.value)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_emulator_imports_changes_without_waiting_for_pydantic() -> None:
    code = "import sys, isthmus.topology.faults.script; print('pydantic' in sys.modules, 'yaml' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False False"
