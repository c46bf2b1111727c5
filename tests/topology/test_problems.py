"""How problems are told: all at once, with their lines, at bounded length."""

import pytest

from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.errors import ConfigError
from tests.topology.documents import TOPOLOGY, changed, told


def test_mistakes_of_every_kind_are_told_together_in_the_order_of_the_text() -> None:
    text = TOPOLOGY
    for old, new in (
        ("name: tri-coast", "name: tri-coast\nname: again"),
        ("memory: 80GiB", "memory: 80"),
        ("nodes: 4", "nodes: 010"),
        ("like: virginia", "like: virginai"),
        ("[oregon, virginia]", "[oregon, virgina]"),
        ("min_sites: 2", "min_sites: 4"),
        ("detect_within: 15s", "detect_within: 15s, start_within: 10s"),
        ("emulate: true", "emulates: true"),
    ):
        text = changed(text, old, new)
    assert [line.split()[0] for line in told("topology", text)] == [
        "3:1",
        "5:44",
        "9:12",
        "16:24",
        "18:24",
        "29:45",
        "29:61",
        "31:1",
    ]


def test_a_problem_prints_its_line_and_a_caret() -> None:
    with pytest.raises(ConfigError) as raised:
        load_topology(changed(TOPOLOGY, "rtt: 62ms", "rtt_mss: 62ms"), "tri.yaml")
    assert str(raised.value) == (
        "tri.yaml:17:56: error: unknown key 'rtt_mss' (did you mean 'rtt'?)  [links.0.rtt_mss]\n"
        "     17 |   - {between: [oregon, virginia], bandwidth: 10Gbit/s, rtt_mss: 62ms, "
        "loss: 0.001%, jitter: 1ms}\n"
        f"        | {' ' * 55}^"
    )


def test_a_long_line_is_shown_around_the_caret_and_controls_are_not_sent_to_the_terminal() -> None:
    text = "a: " + "x" * 300 + "\x1b[31m"
    with pytest.raises(ConfigError) as raised:
        load_topology(text, "t.yaml")
    _, excerpt, caret = str(raised.value).split("\n")
    assert "\x1b" not in excerpt
    assert len(excerpt) < 140
    assert excerpt[caret.index("^")] == "\N{REPLACEMENT CHARACTER}"


def test_a_name_as_long_as_the_file_is_not_told_in_full() -> None:
    text = changed(TOPOLOGY, "emulate: true", "x" * 900 + ": true")
    with pytest.raises(ConfigError) as raised:
        load_topology(changed(text, "like: virginia", "like: " + "y" * 5000), "t.yaml")
    assert len(raised.value.problems) == 2
    assert len(str(raised.value)) < 2500
