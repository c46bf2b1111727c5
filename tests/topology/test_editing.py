"""Figures put into a topology's text: everything else stays as it is, character for character."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.documents.editing import with_measured
from isthmus.topology.documents.load import load_topology
from isthmus.topology.presets.templates import PRESETS, topology_yaml
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.text.yaml_document import read_document

FIGURES = {"bandwidth": "8.7Gbit/s", "rtt": "64ms", "at": "2026-05-01T12:00:00Z"}
FLOW = "{bandwidth: 8.7Gbit/s, rtt: 64ms, at: 2026-05-01T12:00:00Z}"
HEAD = "sites: [] # none\n"


def edited(links: str, *indices: int, figures: dict[str, str] = FIGURES) -> str:
    """Return what became of the links."""
    text = with_measured(HEAD + links, "t.yaml", dict.fromkeys(indices or (0,), figures))
    assert text.startswith(HEAD)
    return text.removeprefix(HEAD)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Nothing there yet: flow style.
        ("links: [{a: 1}]\n", f"links: [{{a: 1, measured: {FLOW}}}]\n"),
        ("links:\n  - {a: 1,  b: [x] } # why\n", f"links:\n  - {{a: 1,  b: [x], measured: {FLOW} }} # why\n"),
        ("links:\n- {a: 1, # one\n   b: 2, # two\n  }\n", f"links:\n- {{a: 1, # one\n   b: 2, measured: {FLOW}, # two\n  }}\n"),
        # Block style.
        ("links:\n  - a: 1 # why\n    b: 2 # and\n  # next\n  - c: 3\n", f"links:\n  - a: 1 # why\n    b: 2 # and\n    measured: {FLOW}\n  # next\n  - c: 3\n"),
        ("links:\n- a: 1\n  b:\n  - x\n  - y: {z: 1} # deep\n\n# end\n", f"links:\n- a: 1\n  b:\n  - x\n  - y: {{z: 1}} # deep\n  measured: {FLOW}\n\n# end\n"),
        ("links:\n  -   a: 1", f"links:\n  -   a: 1\n      measured: {FLOW}"),
        ("links:\r\n  - a: 1\r\n", f"links:\r\n  - a: 1\r\n    measured: {FLOW}\r\n"),
        ("links:\n  - a: |\n      text\nemulate: true\n", f"links:\n  - a: |\n      text\n    measured: {FLOW}\nemulate: true\n"),
        # There already: flow style.
        ("links: [{measured: {}, a: 1}]\n", f"links: [{{measured: {FLOW}, a: 1}}]\n"),
        (
            "links: [{measured: {rtt: 1ms, bandwidth: 1bit/s}, a: 1}] # all\n",
            "links: [{measured: {rtt: 64ms, bandwidth: 8.7Gbit/s, at: 2026-05-01T12:00:00Z}, a: 1}] # all\n",
        ),
        ("links: [{measured: {rtt: 1ms, loss: 1%}}]\n", f"links: [{{measured: {FLOW}}}]\n"),
        # There already: block style.
        (
            "links:\n  - measured: # by probe\n      at: '2020-01-01' # old\n      rtt: 1ms # far\n    a: 1\n",
            "links:\n  - measured: # by probe\n      at: 2026-05-01T12:00:00Z # old\n      rtt: 64ms # far\n      bandwidth: 8.7Gbit/s\n    a: 1\n",
        ),
        (
            "links:\n  - a: 1\n    measured:\n      jitter: 1ms\n      rtt: 1ms # far\n# end\n",
            "links:\n  - a: 1\n    measured:\n      bandwidth: 8.7Gbit/s\n      rtt: 64ms\n      at: 2026-05-01T12:00:00Z # far\n# end\n",
        ),
    ],
)  # fmt: skip
def test_what_changes_is_the_figures_alone(before: str, after: str) -> None:
    assert edited(before) == after
    assert edited(after) == after


def test_several_links_at_once() -> None:
    before = "links:\n  - {a: 1}\n  - b: 2\n  - {c: 3}\n"
    after = f"links:\n  - {{a: 1, measured: {FLOW}}}\n  - b: 2\n  - {{c: 3, measured: {FLOW}}}\n"
    assert edited(before, 2, 0) == after


def test_anchors_that_are_elsewhere_do_no_harm() -> None:
    before = "other: &x [1]\nagain: *x\nlinks: [{a: 1}]\n"
    assert edited(before).endswith(f"links: [{{a: 1, measured: {FLOW}}}]\n")


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("links: [&x {a: 1}, *x]\n", "an anchor (&) or alias (*) shares it"),
        ("links: [{a: &x 1}, {b: *x}]\n", "an anchor (&) or alias (*) shares it"),
        ("links: []\n", "there is no link 0"),
        ("other: 1\n", "there is no link 0"),
        ("links: [{a: 1, a: 2}]\n", "duplicate key 'a'"),
        ("links: [\n", "error"),
    ],
)
def test_what_cannot_be_edited_is_refused(links: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        edited(links)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_stay_as_they_are_but_for_the_figures(preset: str) -> None:
    text = topology_yaml(preset)
    count = len(read_document(text, "t").sequence("links"))
    after = with_measured(text, "t", dict.fromkeys(range(count), FIGURES))
    assert after.replace(f", measured: {FLOW}", "") == text
    world = load_topology(after, "t")
    assert {link.rtt_s for link in world.links} == {0.064}


FIGURE_NAMES = st.sampled_from(["bandwidth", "rtt", "jitter", "loss", "at"])


@pytest.mark.slow
@given(
    rows=st.lists(
        st.tuples(st.booleans(), st.lists(FIGURE_NAMES, unique=True), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    figures=st.dictionaries(FIGURE_NAMES, st.sampled_from(["1ms", "2%", "x"]), min_size=1),
    index=st.integers(0, 3),
)
def test_any_mixture_of_styles_comes_out_right(
    rows: list[tuple[bool, list[str], bool]], figures: dict[str, str], index: int
) -> None:
    lines = ["links: # all of them"]
    for is_flow, there, is_last in rows:
        if is_flow:
            inner = ", ".join(f"{key}: 0" for key in there)
            lines.append(f"  - {{a: 1, measured: {{{inner}}}, b: 2}} # flow")
            continue
        block = ["    measured: # block", *(f"      {key}: 0 # {key}" for key in there)]
        block = block if there else ["    # none yet"]
        own = ["    b: 2 # two"]
        lines += ["  - a: 1 # one", *(own + block if is_last else block + own)]
    text = "\n".join([*lines, "# the end", ""])
    index %= len(rows)
    after = with_measured(text, "t", {index: figures})
    # What is right is checked inside; here, that every other link's lines are untouched.
    read = read_document(after, "t")
    assert read.value["links"][index]["measured"] == figures  # type: ignore[index]
    assert after.endswith("# the end\n")
    assert after.count("# one") == text.count("# one")
    assert with_measured(after, "t", {index: figures}) == after
