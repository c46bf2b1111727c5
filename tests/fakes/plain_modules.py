"""Compiled modules as the plain Python that they were made of, beside the compiled ones."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from isthmus.sites.compiled import PACKAGE, why_plain

WAYS = [
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(why_plain() is not None, reason=f"nothing is: {why_plain()}"),
    ),
    "plain",
]
"""Both ways in which such a module runs, for tests' parameters."""


def load_plain(module: ModuleType) -> ModuleType:
    """Return the plain twin of a module; imports of its name still find the module itself."""
    file = PACKAGE.joinpath(*module.__name__.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(module.__name__, file)
    assert spec is not None
    assert spec.loader is not None
    twin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(twin)
    return twin


def use_plain(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Have all of isthmus that has imported `module` use its plain twin; return that."""
    twin = load_plain(module)
    ours = [found for name, found in sys.modules.items() if name.startswith("isthmus.")]
    for user in ours:
        for name, value in [*vars(user).items()]:
            if value is module:
                monkeypatch.setattr(user, name, twin)
    return twin
