"""What torch.compile takes is looked for before the first step."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from isthmus.sites.trainer.compiling import check_can_compile
from isthmus.topology.spec.errors import ConfigError


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"oregon, which has no C\+\+ compiler .*install g\+\+"):
        check_can_compile("oregon")


def test_without_python_headers_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "sh")  # is everywhere
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"no Python\.h in .*python3-dev.*trainer\.compile"):
        check_can_compile("oregon")
    (tmp_path / "Python.h").touch()
    check_can_compile("oregon")
