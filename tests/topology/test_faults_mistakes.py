"""Seeded mistakes in a fault script: each is told at its line and column, in these words."""

import pytest

from isthmus.topology.documents.load import document_kind, load_topology
from isthmus.topology.faults.loading import check_faults, load_faults
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.text.yaml_document import read_with_overrides
from tests.topology.documents import changed
from tests.topology.fault_documents import SCRIPT, TOPOLOGY

DURATION = "want a duration in ns, us, ms, s, min, h, as 80ms; got"
ACTIONS = "'link', 'partition', 'cut', 'flap', 'heal', 'pause', 'kill' or 'reset'"

MISTAKES: list[tuple[str, str, list[str]]] = [
    ("version: 1\n", "", ["1:1 missing key 'version' []"]),
    ("seed: 7", "seed: -7", ["2:7 want at least 0, got -7 [seed]"]),
    ("seed: 7", "sed: 7", ["2:1 unknown key 'sed' (did you mean 'seed'?) [sed]"]),
    ("at: 5s", "at: 5", [f"4:10 {DURATION} 5 without a unit [faults.0.at]"]),
    ("at: 5s, ", "", ["4:5 missing key 'at' [faults.0]"]),
    ("8s..10s", "10s..8s", ["5:10 want the earlier time first, got '10s..8s' [faults.1.at]"]),
    ("8s..10s", "8..10s", [f"5:10 {DURATION} '8' without a unit [faults.1.at]"]),
    ("8s..10s", "8s..", [f"5:10 {DURATION} '' [faults.1.at]"]),
    ("8s..10s", "[8s, 10s]", [f"5:10 {DURATION} a list [faults.1.at]"]),
    (
        "rate: 10Mbit/s",
        "rate: 0bit/s",
        ["4:42 must be more than 0, got '0bit/s' [faults.0.rate]"],
    ),
    (
        "rate: 10Mbit/s",
        "rtt: 10",
        [f"4:41 {DURATION} 10 without a unit [faults.0.rtt]"],
    ),
    (
        "rate: 10Mbit/s",
        "loss: 101%",
        ["4:42 want a share of 0 to 1, or 0% to 100%; got '101%' [faults.0.loss]"],
    ),
    (
        "rate: 10Mbit/s",
        "loss: 100%",
        [
            "4:42 a link that loses every packet carries nothing: want less than 100%. Leave the "
            "link out, or cut it for a time with a fault script (cut: [a, b]) [faults.0.loss]"
        ],
    ),
    (
        ", rate: 10Mbit/s",
        "",
        ["4:5 changes nothing: want one or more of 'rate', 'rtt', 'jitter' or 'loss' [faults.0]"],
    ),
    (
        "rate: 10Mbit/s",
        "rat: 10Mbit/s",
        [
            "4:36 unknown key 'rat' (did you mean 'rate'?) [faults.0.rat]",
        ],
    ),
    (
        "link: [east, middle]",
        "link: [east, midle]",
        ["4:27 unknown site 'midle' (did you mean 'middle'?) [faults.0.link.1]"],
    ),
    (
        "link: [east, middle]",
        "link: [east, xyz]",
        ["4:27 unknown site 'xyz': 'chain' has east, middle, west [faults.0.link.1]"],
    ),
    (
        "link: [east, middle]",
        "link: [east, west]",
        ["4:20 there is no link between 'east' and 'west' in 'chain' [faults.0.link]"],
    ),
    (
        "link: [east, middle]",
        "link: [east, east]",
        ["4:27 a link from 'east' to itself [faults.0.link.1]"],
    ),
    (
        "link: [east, middle]",
        "link: [east]",
        ["4:20 want at least 2 of them, got 1 [faults.0.link]"],
    ),
    ("link: [east, middle]", "link: east", ["4:20 want a list, got 'east' [faults.0.link]"]),
    (
        "partition: [[east], [middle, west]]",
        "partitoin: [[east], [middle, west]]",
        ["5:19 unknown key 'partitoin' (did you mean 'partition'?) [faults.1.partitoin]"],
    ),
    (
        "[[east], [middle, west]]",
        "[[east], [middle, east]]",
        ["5:48 'east' is already in another group [faults.1.partition.1.1]"],
    ),
    (
        "[[east], [middle, west]]",
        "[[east, east], [middle]]",
        ["5:38 'east' is already in this group [faults.1.partition.0.1]"],
    ),
    (
        "[[east], [middle, west]]",
        "[[east], [west]]",
        ["5:30 no link of 'chain' joins these groups [faults.1.partition]"],
    ),
    (
        "[[east], [middle, west]]",
        "[[east, middle]]",
        ["5:30 want at least 2 of them, got 1 [faults.1.partition]"],
    ),
    (
        "[[east], [middle, west]]",
        "[[east], []]",
        [
            "5:39 want at least 1 of them, got 0 [faults.1.partition.1]",
        ],
    ),
    (
        "cut: [east, middle], oneway: true",
        "cut: [east, middle], oneway: 1",
        ["6:44 want true or false, got 1 [faults.2.oneway]"],
    ),
    (
        "cut: [east, middle], oneway: true",
        "cut: [east, middle], rate: 1Mbit/s, up: 1s",
        ["6:36 has no use with 'cut' [faults.2.rate]", "6:51 has no use with 'cut' [faults.2.up]"],
    ),
    (
        "cut: [east, middle], oneway: true",
        "cut: [east, middle], heal: all",
        ["6:36 a second action beside 'cut': give it a fault of its own [faults.2.heal]"],
    ),
    (
        "cut: [east, middle], oneway: true",
        "for: 3s",
        [f"6:5 does nothing: want one of {ACTIONS} [faults.2]"],
    ),
    (
        "up: 300ms..1s, down: 100ms..400ms, for: 5s",
        "for: 5s",
        [
            "7:5 missing key 'up', which 'flap' needs [faults.3]",
            "7:5 missing key 'down', which 'flap' needs [faults.3]",
        ],
    ),
    (
        "up: 300ms..1s",
        "up: 0s..1s",
        ["7:41 want at least 1ms, got '0s..1s' [faults.3.up]"],
    ),
    (
        "up: 300ms..1s, down: 100ms..400ms, for: 5s",
        "up: 1ms..1s, down: 1ms..1s, for: 1min",
        [
            "7:70 could be more than 10000 cuts: want a shorter time, or longer ups and downs [faults.3.for]"
        ],
    ),
    (
        "heal: all",
        "heal: every",
        ["8:21 want all, or two sites as [a, b]; got 'every' [faults.4.heal]"],
    ),
    (
        "heal: all",
        "heal: all, oneway: true",
        ["8:26 has no use with 'heal: all' [faults.4.oneway]"],
    ),
    ("heal: all", "heal: all, for: 3s", ["8:26 has no use with 'heal' [faults.4.for]"]),
    (
        "pause: west, for: 2s",
        "pause: west",
        ["9:5 missing key 'for', which 'pause' needs [faults.5]"],
    ),
    (
        "pause: west, for: 2s",
        "pause: wset, for: 2s",
        ["9:22 unknown site 'wset' (did you mean 'west'?) [faults.5.pause]"],
    ),
    (
        "pause: west, for: 2s",
        "pause: west, for: 2s..6s",
        [
            "12:22 'west' may still be paused by the fault at line 9, which lasts from 22s to 28s [faults.8.pause]"
        ],
    ),
    (
        "reset: [east, middle]",
        "reset: [east, middle], for: 1s",
        ["10:38 has no use with 'reset' [faults.6.for]"],
    ),
    (
        "{at: 26s, reset: [middle, west]}",
        "reset",
        ["11:5 want a mapping, got 'reset' [faults.7]"],
    ),
]


def told(text: str) -> list[str]:
    try:
        load_faults(text, "faults.yaml", load_topology(TOPOLOGY, "topology.yaml"))
    except ConfigError as error:
        return [
            f"{each.line}:{each.column} {each.message} [{each.path}]" for each in error.problems
        ]
    return []


@pytest.mark.parametrize(("old", "new", "expected"), MISTAKES)
def test_a_mistake_is_told_at_its_place(old: str, new: str, expected: list[str]) -> None:
    assert told(changed(SCRIPT, old, new)) == expected


def test_the_script_that_the_mistakes_are_made_in_is_right() -> None:
    assert told(SCRIPT) == []
    assert check_faults(read_with_overrides(SCRIPT, "faults.yaml", ())) == 10
    assert document_kind(read_with_overrides(SCRIPT, "faults.yaml", ())) == "faults"


def test_mistakes_of_every_kind_are_told_together_in_the_order_of_the_text() -> None:
    text = SCRIPT
    for old, new in (
        ("seed: 7", "seed: x"),
        ("at: 5s", "at: 5"),
        ("8s..10s", "10s..8s"),
        ("cut: [east, middle]", "cut: [east, west]"),
        ("pause: west, for: 2s", "pause: wets, for: 2s"),
        ("at: 25s, reset", "at: 25s, rest"),
    ):
        text = changed(text, old, new)
    assert [line.split()[0] for line in told(text)] == [
        "2:7",
        "4:10",
        "5:10",
        "6:20",
        "9:22",
        "10:15",
    ]


def test_a_problem_prints_its_line_and_a_caret() -> None:
    with pytest.raises(ConfigError) as raised:
        load_faults(
            changed(SCRIPT, "heal: all", "heel: all"),
            "night.yaml",
            load_topology(TOPOLOGY, "topology.yaml"),
        )
    assert str(raised.value) == (
        "night.yaml:8:15: error: unknown key 'heel' (did you mean 'heal'?)  [faults.4.heel]\n"
        "      8 |   - {at: 21s, heel: all}\n"
        f"        | {' ' * 14}^"
    )


def test_a_way_that_only_exists_back_is_hinted_at() -> None:
    oneway = changed(
        TOPOLOGY,
        "  - {between: [east, middle], bandwidth: 1Gbit/s, rtt: 20ms}\n",
        "  - {between: [east, middle], bandwidth: 1Gbit/s, rtt: 20ms}\n"
        "  - {between: [west, east], oneway: true, bandwidth: 1Gbit/s, rtt: 20ms}\n",
    )
    topology = load_topology(oneway, "topology.yaml")
    text = "version: 1\nfaults:\n  - {at: 1s, cut: [east, west]}\n"
    assert load_faults(text, "f", topology).faults[0].links == (("west", "east"),)
    with pytest.raises(
        ConfigError,
        match="no link from 'east' to 'west' in 'chain'; there is one from 'west' to 'east'",
    ):
        load_faults(changed(text, "west]", "west], oneway: true"), "f", topology)


def test_without_a_topology_only_names_are_not_checked() -> None:
    text = changed(SCRIPT, "cut: [east, middle]", "cut: [mars, moon]")
    assert check_faults(read_with_overrides(text, "faults.yaml", ())) == 10
    with pytest.raises(ConfigError, match="itself"):
        check_faults(read_with_overrides(changed(text, "[mars, moon]", "[mars, mars]"), "x", ()))


@pytest.mark.parametrize("text", ["", "[]", "faults: 7\nversion: 1\n", "version: 1\nfaults: []\n"])
def test_what_is_no_script_is_told(text: str) -> None:
    assert told(text) != []
