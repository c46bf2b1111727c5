"""Compiled modules in each way in which they can run: as plain Python, too."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from types import ModuleType
from typing import Final

import pytest

from isthmus.sites.compiled import COMMON, PACKAGE, folder_below, kinds, why_plain

COMPILED: Final = pytest.mark.skipif(why_plain() is not None, reason=f"plain, for {why_plain()}")
PLAIN: Final = "plain"
WAYS: Final = [pytest.param(COMMON, marks=COMPILED), PLAIN]
"""For tests' parameters."""
VECTORISED_WAYS: Final = [*(pytest.param(kind, marks=COMPILED) for kind in kinds()), PLAIN]
"""The ways of a module that is compiled for several kinds of processors."""


def load(module: ModuleType, way: str) -> ModuleType:
    """Return a module as it runs in one of the ways; imports of its name still find `module`."""
    place = module.__name__.split(".")[1:]
    if way == PLAIN:
        file = PACKAGE.joinpath(*place).with_suffix(".py")
    else:
        file = folder_below(PACKAGE).joinpath(way, *place)
        file = file.with_name(f"{file.name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    spec = importlib.util.spec_from_file_location(module.__name__, file)
    assert spec is not None
    assert spec.loader is not None
    twin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(twin)
    return twin


def use(module: ModuleType, way: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Have all of isthmus that has imported `module` use it as it runs that way; return that."""
    twin = load(module, way)
    ours = [found for name, found in sys.modules.items() if name.startswith("isthmus.")]
    for user in ours:
        for name, value in [*vars(user).items()]:
            if value is module:
                monkeypatch.setattr(user, name, twin)
    return twin
