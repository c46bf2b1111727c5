"""What `isthmus bench --require` takes, and when it is met."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.orchestrator.evidence.bench.requirements import EXAMPLES, parse_requirement
from tests.fakes.benches import a_bench, an_interrupted_bench


@pytest.mark.parametrize(
    ("text", "figure", "unit", "compare", "limit"),
    [
        ("efficiency>=0.96", "efficiency", "", ">=", 0.96),
        (" efficiency >= 96% ", "efficiency", "%", ">=", 96.0),
        ("egress<=1.2 USD/day", "egress", "USD/day", "<=", 1.2),
        ("egress<.5USD/step", "egress", "USD/step", "<", 0.5),
        ("tokens/s>5000", "tokens/s", "", ">", 5000.0),
        ("step<=200ms", "step", "s", "<=", 0.2),
    ],
)
def test_what_is_understood(text: str, figure: str, unit: str, compare: str, limit: float) -> None:
    found = parse_requirement(text)
    assert (found.figure, found.unit, found.compare) == (figure, unit, compare)
    assert found.limit == pytest.approx(limit)


def test_the_examples_are_some() -> None:
    assert [parse_requirement(each).figure for each in EXAMPLES.split(", ")]


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("efficency>=0.9", "did you mean 'efficiency'"),
        ("loss<=2", "want one of efficiency, tokens/s, step, egress"),
        ("efficiency=0.9", "want FIGURE>=NUMBER"),
        ("efficiency>=high", "want a number or a number %"),
        ("egress<=1.2", "want a number USD/day or a number USD/step"),
        ("egress<=1.2 EUR/day", "want a number USD/day"),
        ("step<=2", "without a unit"),
        ("", "want FIGURE>=NUMBER"),
    ],
)
def test_what_is_not_says_what_would_be(text: str, cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        parse_requirement(text)


def test_each_setting_has_to_meet_it() -> None:
    bench = a_bench()
    results = [each.result for each in bench.settings if each.result is not None]
    assert len(results) > 1
    assert not parse_requirement("efficiency>=0").unmet(bench)
    assert len(parse_requirement("efficiency>=100%").unmet(bench)) == len(results)
    best = max(each.efficiency.mean for each in results)
    missed = parse_requirement(f"efficiency>={best:.6f}").unmet(bench)
    assert len(missed) >= len(results) - 1
    assert all("measured 0." in each and "=" in each.partition(" at ")[2] for each in missed)


def test_money_is_by_the_step_and_by_the_day() -> None:
    bench = a_bench()
    result = bench.settings[0].result
    assert result is not None
    links = tuple(dataclasses.replace(each, egress_usd_per_step=0.01) for each in result.links)
    priced = dataclasses.replace(result, links=links)
    setting = dataclasses.replace(bench.settings[0], result=priced)
    bench = dataclasses.replace(bench, settings=(setting,))
    usd = 0.01 * len(links)
    for amount, unit in ((usd, "USD/step"), (usd / result.step_s.mean * 86400, "USD/day")):
        assert not parse_requirement(f"egress<={amount * 1.001} {unit}").unmet(bench)
        assert parse_requirement(f"egress<={amount * 0.999} {unit}").unmet(bench)


def test_what_was_not_measured_is_not_judged() -> None:
    bench = an_interrupted_bench()
    measured = [each for each in bench.settings if each.result is not None]
    assert len(parse_requirement("tokens/s>1000000000000").unmet(bench)) == len(measured)
