"""scripts/environment.py passes on what pip was told, and says what will be downloaded."""

from pathlib import Path

import pytest

from scripts import environment
from scripts.environment import _as_uv_has_it, _download


def test_pips_settings_hold_and_its_environment_wins() -> None:
    listed = """:env:.cert='/etc/own.pem'
:env:.find-links='/one'
:env:.no-color='1'
global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple?x=1'
global.find-links='/other'
"""
    options, variables = _as_uv_has_it(listed)
    assert options == [
        *("--index", "https://a.example/simple", "--index", "https://b.example/simple?x=1"),
        *("--find-links", "/one", "--index-strategy", "unsafe-best-match"),
    ]
    assert variables == {"SSL_CERT_FILE": "/etc/own.pem"}
    assert _as_uv_has_it("") == ([], {})


def test_the_download_is_what_is_not_there_yet_by_size() -> None:
    lock = {
        "packages": [
            {"name": "torch", "version": "2", "wheels": [{"size": 500_000_000}]},
            {"name": "numpy", "version": "2", "wheels": [{"size": 9_000_000}, {"size": 8_000_000}]},
            {"name": "there", "version": "1", "wheels": [{"size": 1_000_000}]},
            {"name": "source", "version": "1", "sdist": {"size": 1_000_000}},
            {"name": "on-disk", "version": "1", "wheels": [{"url": "file:///x.whl"}]},
        ]
    }
    assert _download(lock, {"there": "1", "numpy": "1"}) == (
        "installing 4 packages; to download: up to 510 MB, most of it torch 2 500 MB, "
        "numpy 2 9 MB, source 1 1 MB"
    )
    assert _download({"packages": lock["packages"][4:]}, {}) == (
        "installing 1 packages; to download: up to 0 MB"
    )


UV = """#!/bin/sh
echo "plain: $ISTHMUS_PLAIN" >> {calls}
[ -n "$ISTHMUS_PLAIN" ] || {{ echo "{error}" >&2; exit 1; }}
"""


@pytest.mark.parametrize("error", ["no solution found: ziglang", "Cython refused a module"])
def test_only_where_no_compiler_is_to_be_had_isthmus_is_installed_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.setattr(environment, "_pips_settings", lambda _: ([], {}))
    monkeypatch.delenv("ISTHMUS_PLAIN", raising=False)
    uv, calls = tmp_path / "uv", tmp_path / "calls"
    uv.write_text(UV.format(calls=calls, error=error))
    uv.chmod(0o755)
    if "ziglang" in error:
        environment._install_own(tmp_path / "python")
        assert calls.read_text() == "plain: \nplain: 1\n"
        return
    with pytest.raises(SystemExit, match=error):
        environment._install_own(tmp_path / "python")
    assert calls.read_text() == "plain: \n"
