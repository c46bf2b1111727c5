"""What a script sets for all of torch is for its own tensors: ours name their dtype and device."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[2]
SITES = ROOT / "sites"
OWN_SCRIPT = SITES / "trainer"
"""It sets no defaults, so its model may be of the default dtype."""
FACTORIES = {each.__name__ for each in _device_constructors()}
"""What `torch.set_default_device` changes."""


def unnamed_in(source: str) -> Iterator[int]:
    """Yield the lines of a module that make a tensor of a default dtype or on a default device."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)):
                given = {each.arg for each in node.keywords}
                if name in FACTORIES and not {"dtype", "device"} <= given:
                    yield node.lineno


def test_every_tensor_names_its_dtype_and_device() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(SITES.rglob("*.py"))
        if not path.is_relative_to(OWN_SCRIPT)
        for line in unnamed_in(path.read_text())
    ]
    assert not found, "name dtype= and device=, which a script may set for all of torch"


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("torch.zeros(3)", True),
        ("torch.tensor([1.0], dtype=torch.float32)", True),
        ("torch.arange(3, device=where)", True),
        ("torch.full((1,), 0.5, dtype=torch.float32, device=where)", False),
        ("torch.empty_like(other)", False),
    ],
)
def test_the_rule_finds_what_it_is_for(line: str, is_found: bool) -> None:
    assert bool([*unnamed_in(line)]) is is_found
