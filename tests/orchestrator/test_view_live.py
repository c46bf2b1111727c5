"""The live table and the plain line, from runs with and without figures."""

import io
import itertools
import re

import pytest
from rich.console import Console

from isthmus.orchestrator.evidence.view.live import (
    MOST_LINKS,
    LiveTable,
    current_phase,
    plain_line,
    slow_words,
    start_phases,
)
from isthmus.protos.control.v1 import control_pb2

STEP = {
    "loss": 2.5,
    "site_tokens": 8192.0,
    "step_s": 0.4096,
    "exposed_inter_s": 0.0513,
    "wait_s": 0.011,
}
LINK = {
    "sent_bytes": 3e9,
    "raw_bytes": 12e9,
    "throughput_bytes_per_s": 30e6,
    "rtt_s": 0.0653,
}


def run(**changed: object) -> control_pb2.Run:
    made = control_pb2.Run(
        run_id="r1",
        name="tri-coast",
        state=control_pb2.RUN_STATE_ACTIVE,
        active_s=75.3,
        totals={"loss": 2.5},
        sites=[
            control_pb2.SiteStatus(
                site=name, state=control_pb2.SITE_STATE_RUNNING, step=120, latest=STEP
            )
            for name in ("oregon", "frankfurt")
        ],
        links=[
            control_pb2.LinkStatus(
                source="oregon", target="frankfurt", bytes_per_s=62.5e6, rtt_s=0.062, latest=LINK
            )
        ],
    )
    made.MergeFrom(control_pb2.Run(**changed))  # type: ignore[arg-type]
    return made


def render(
    shown: control_pb2.Run, width: int = 80, *, all_links: bool = False, **options: bool
) -> str:
    console = Console(file=io.StringIO(), width=width, **options)  # type: ignore[arg-type]
    console.print(LiveTable(shown, all_links=all_links), crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_a_run_at_work_shows_every_figure_in_80_columns() -> None:
    text = render(run())
    assert rows(text) == [
        ["r1", "tri-coast", "ACTIVE"],
        ["1min 15s", "step 120", "loss 2.5000", "40k tokens/s", "WAN 51.3ms a step (13%)"],
        [""],
        ["site", "state", "step", "loss", "tokens/s", "WAN", "share", "wait", "step time"],
        ["oregon", "running", "120", "2.5000", "20k", "51.3ms", "13%", "11ms", "410ms"],
        ["frankfurt", "running", "120", "2.5000", "20k", "51.3ms", "13%", "11ms", "410ms"],
        [""],
        ["link", "throughput", "configured", "use", "sent", "ratio", "RTT", "set to"],
        [
            *("oregon → frankfurt", "240Mbit/s", "500Mbit/s", "48%", "2.79GiB", "4.00x", "65.3ms"),
            "62ms",
        ],
    ]


def test_mfu_stands_by_the_tokens_and_an_estimate_is_said_to_be_one() -> None:
    shown = run()
    assert "MFU" not in plain_line(shown)
    shown.sites[0].latest["mfu_estimate"] = 0.4
    assert "MFU" not in plain_line(shown), "that of a site is not known"
    shown.sites[1].latest["mfu_estimate"] = 0.052
    found = rows(render(shown, width=120))
    at = found[3].index("MFU")
    assert found[3][at - 1] == "tokens/s"
    assert [found[4][at], found[5][at]] == ["40% est.", "5.2% est."]
    # As many tokens at both: the second has 7.7 times the peak.
    assert "MFU 9.2% est." in found[1]
    for site in shown.sites:
        site.latest["mfu"] = 0.38
    assert "  MFU 38%  " in plain_line(shown)


def test_columns_without_figures_are_left_out() -> None:
    forming = control_pb2.Run(
        run_id="r1",
        name="n",
        state=control_pb2.RUN_STATE_FORMING,
        sites=[control_pb2.SiteStatus(site="eu", state=control_pb2.SITE_STATE_PREPARED)],
        links=[control_pb2.LinkStatus(source="eu", target="us", bytes_per_s=1e6)],
    )
    assert rows(render(forming)) == [
        ["r1", "n", "FORMING"],
        ["agents 1 of 1, gateways 1 of 1, script starts (import torch) at eu"],
    ]
    assert rows(render(control_pb2.Run(run_id="r1"))) == [["r1", "UNKNOWN"]]


def test_one_site_without_figures_shows_dashes() -> None:
    shown = run()
    shown.sites[1].ClearField("latest")
    line = next(line for line in render(shown).splitlines() if line.startswith("frankfurt"))
    assert line.split() == ["frankfurt", "running", *["-"] * 7]


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60, 79])
def test_a_narrow_terminal_loses_columns_and_cuts_no_number(width: int) -> None:
    text = render(run(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    whole = {cell for row in rows(render(run(), 200)) for cell in row}
    for row in rows(text)[-1:]:
        assert set(row) <= whole or "…" in row[0]


def starting(*states: str) -> control_pb2.Run:
    return control_pb2.Run(
        run_id="r1",
        state=control_pb2.RUN_STATE_FORMING,
        sites=[
            control_pb2.SiteStatus(site=f"s{at}", state=f"SITE_STATE_{state}")  # type: ignore[arg-type]
            for at, state in enumerate(states)
        ],
    )


@pytest.mark.parametrize(
    ("states", "phase", "shown"),
    [
        (("ABSENT", "JOINED"), "agents", "agents 1 of 2 (waits for s0)"),
        (("PREPARED", "JOINED"), "gateways", "agents 2 of 2, gateways 1 of 2 (waits for s1)"),
        (("RUNNING", "STARTING"), "script", "gateways 2 of 2, script starts (import torch) at s1"),
        (("RUNNING", "RUNNING"), "first", "joined 2 of 2, first step"),
        (("ABSENT",) * 7, "agents", "agents 0 of 7 (waits for s0, s1, s2, s3 and 3 more)"),
    ],
)
def test_a_start_is_told_by_its_phases(states: tuple[str, ...], phase: str, shown: str) -> None:
    forming = starting(*states)
    assert current_phase(forming) == phase
    assert start_phases(forming).endswith(shown)
    forming.links.add(source="s0", target="s1", latest={"sent_bytes": 0.0, "raw_bytes": 0.0})
    assert len(render(forming).splitlines()) <= 3, "no table is empty"
    assert not start_phases(run())
    assert not current_phase(run())


def test_what_a_site_fetches_is_told_with_how_far_it_is() -> None:
    forming = starting("PREPARED", "JOINED")
    forming.sites[1].fetching = "fetching corpus.bin: 3GiB of 17GiB"
    shown = "agents 2 of 2, gateways 1 of 2 (s1: fetching corpus.bin: 3GiB of 17GiB)"
    assert start_phases(forming) == shown
    assert shown in plain_line(forming)


def test_where_the_jobs_steps_are_known_there_are_a_bar_and_the_time_that_is_left() -> None:
    shown = run(num_steps=150, totals={"step_s": 0.5}, loss_curve=[4.0, 3.0, 2.0])
    text = render(shown)
    assert "step 120 of 150" in text
    assert f"{'█' * 32}{'░' * 8} 80%, 15s left" in text
    assert "loss █▅▁" in text
    assert "step 120 of 150" in plain_line(shown)
    narrow = render(shown, width=30)
    assert max(len(line) for line in narrow.splitlines()) <= 30
    ended = run(num_steps=150, state=control_pb2.RUN_STATE_SUCCEEDED)
    assert "left" not in render(ended)
    assert "80%" not in render(run()), "its script decides how many steps it makes"


def test_a_stream_that_knows_ascii_only_gets_an_ascii_bar() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)
    console.print(LiveTable(run(num_steps=150, loss_curve=[3.0, 2.0])))
    console.file.flush()
    assert isinstance(console.file, io.TextIOWrapper)
    text = console.file.buffer.getvalue().decode()
    assert "#" * 32 + "." * 8 in text


def test_uncounted_tokens_are_no_rate() -> None:
    shown = run(totals={"counts_tokens": 0.0})
    assert "2.44 steps/s" in plain_line(shown)
    assert "tokens" not in render(shown)
    shown.totals["counts_tokens"] = 1.0
    assert "tokens/s" in plain_line(shown)
    assert "steps/s" not in plain_line(shown)


def test_what_sites_report_alike_is_told_once() -> None:
    notes = [
        control_pb2.Note(
            sequence=at,
            wall_s=1e9,
            kind="site.trouble",
            site=site,
            text=f"site {site}: {at} GiB left",
        )
        for at, site in enumerate(("oregon", "frankfurt", "oregon"), start=1)
    ]
    notes.append(control_pb2.Note(sequence=9, wall_s=1e9, kind="site.lost", text="oregon is lost"))
    text = render(run(noted=notes))
    assert text.count("GiB left") == 1
    assert "site oregon: 1 GiB left (and 2 others)" in text
    assert "note: oregon is lost" in text


def test_a_site_that_costs_the_others_time_is_named() -> None:
    slow = control_pb2.SlowSite(
        site="oregon", since_step=41, last_step=120, cost_s=1.2, share=0.31, total_s=96, for_s=310
    )
    said = (
        "slow, not hung: site oregon costs the others 1.2s a step (31%) since step 41, for 5min "
        "10s: 1min 36s in all"
    )
    assert said in " ".join(render(run(slow=slow)).split())
    assert plain_line(run(slow=slow)).endswith(said)
    assert "slow" not in render(run())
    slow.is_over = True
    assert "cost the others 1.2s a step (31%) from step 41 to 120" in slow_words(slow)


def test_of_ten_sites_the_links_that_matter_are_shown() -> None:
    shown = run()
    del shown.links[:]
    names = [f"s{at}" for at in range(10)]
    for at, (source, target) in enumerate(itertools.permutations(names, 2)):
        figures = {"throughput_bytes_per_s": 1e6 * (at + 1), "sent_bytes": 1e6 * (1 + at % 80)}
        shown.links.add(source=source, target=target, bytes_per_s=1e8, latest=figures)
    text = render(shown)
    assert text.count("→") == MOST_LINKS
    for slowest in ("s0 → s1", "s0 → s2", "s0 → s3"):
        assert slowest in text
    for most_used in ("s8 → s7", "s8 → s6", "s8 → s5"):
        assert most_used in text
    assert "and 84 more links: isthmus status r1 --all" in text
    assert render(shown, all_links=True).count("→") == 90


def test_no_path_is_broken() -> None:
    path = "/home/somebody/" + "/".join(f"folder-of-a-run-{at}" for at in range(8)) + "/rank1.log"
    shown = run(state=control_pb2.RUN_STATE_FAILED, reason_code="X", reason=f"see {path} for more")
    shown.noted.add(sequence=1, wall_s=1e9, kind="site.trouble", text=f"look at {path}")
    assert render(shown).count(path) == 2


def test_what_comes_from_elsewhere_steers_nothing() -> None:
    shown = run(reason_code="RANK_EXITED", reason="\x1b[2Jrank 1\nended [red]x[/red] [/")
    shown.sites[0].site = "[bold]ore\x1bgon"
    text = render(shown)
    assert "\x1b" not in text
    assert "RANK_EXITED: [2Jrank 1 ended [red]x[/red] [/" in text
    assert "[bold]ore gon" in text


def test_colour_goes_to_terminals_only_and_not_under_no_color() -> None:
    assert "\x1b" not in render(run())
    assert "\x1b[32m" in render(run(), force_terminal=True)
    assert "\x1b[3" not in render(run(), force_terminal=True, no_color=True)


def test_numbers_that_are_none_are_dashes() -> None:
    shown = run()
    shown.sites[0].latest["loss"] = float("nan")
    shown.sites[0].latest["step_s"] = 0.0
    shown.sites[0].latest["exposed_inter_s"] = float("inf")
    line = next(line for line in render(shown).splitlines() if line.startswith("oregon"))
    assert line.split() == ["oregon", "running", "120", "-", "-", "-", "-", "11ms", "0s"]


def test_the_runs_loss_is_the_last_that_all_sites_have_told() -> None:
    shown = run(totals={"loss": 3.625})
    assert "loss 3.6250" in plain_line(shown)


def test_a_site_that_takes_no_part_has_no_share_in_the_runs_figures() -> None:
    for state in ("LOST", "DROPPED", "RETURNING"):
        shown = run(members=["oregon"], epoch=1, totals={"loss": 1.25})
        shown.sites[1].state = control_pb2.SiteState.Value(f"SITE_STATE_{state}")
        shown.sites[1].latest["loss"] = 9.0
        shown.sites[1].latest["step_s"] = 99.0
        line = plain_line(shown)
        assert "loss 1.2500  20k tokens/s  WAN 51.3ms a step (13%)" in line, state
        row = next(row for row in rows(render(shown, 100)) if row[0] == "frankfurt")
        assert row[:5] == ["frankfurt", state.lower(), "120", "9.0000", "-"]


def test_a_site_that_catches_up_has_no_share_in_the_runs_figures() -> None:
    shown = run(members=["oregon", "frankfurt"], epoch=2)
    shown.sites[1].state = control_pb2.SITE_STATE_RETURNING
    assert "20k tokens/s" in plain_line(shown)


def test_a_plain_line_says_it_all_in_one_line() -> None:
    assert plain_line(run()) == (
        "ACTIVE  1min 15s  step 120  loss 2.5000  40k tokens/s  WAN 51.3ms a step (13%)"
    )
    forming = run(state=control_pb2.RUN_STATE_FORMING)
    for site, state in zip(forming.sites, (1, 7), strict=True):
        site.state = state  # type: ignore[assignment]
        site.ClearField("latest")
    forming.active_s = 0
    forming.ClearField("totals")
    assert plain_line(forming) == "FORMING  agents 0 of 1 (waits for oregon)"
    failed = run(state=control_pb2.RUN_STATE_FAILED, reason_code="PEER_LOST", reason="no\nanswer")
    assert plain_line(failed).endswith("(13%)"), "the error says why, once"


def test_states_of_a_newer_coordinator_are_shown_as_they_are() -> None:
    shown = run()
    shown.state = 99  # type: ignore[assignment]
    shown.sites[0].state = 98  # type: ignore[assignment]
    assert plain_line(shown).startswith("99  ")
    assert "98" in render(shown)


def test_a_site_that_follows_is_named_and_has_no_loss() -> None:
    shown = run(members=["oregon", "frankfurt"], epoch=3)
    assert "members since" not in render(shown)
    shown.sites[1].state = control_pb2.SITE_STATE_RETURNING
    shown.sites[1].latest["loss"] = 0.0
    shown.sites[1].latest["site_tokens"] = 0.0
    text = render(shown)
    assert "members since epoch 3: oregon, frankfurt (catching up: frankfurt)" in text
    line = next(line for line in text.splitlines() if line.startswith("frankfurt"))
    assert line.split()[:5] == ["frankfurt", "returning", "120", "-", "-"]
