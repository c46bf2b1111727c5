"""Quantities: exact parsing, formats that read back, and errors that name the units."""

import contextlib
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.spec import units
from isthmus.topology.spec.units import UnitError

EXACT: list[tuple[Callable[[object], float], object, float]] = [
    (units.parse_duration, "80ms", 0.08),
    (units.parse_duration, "8us", 8e-6),
    (units.parse_duration, "15s", 15.0),
    (units.parse_duration, "2min", 120.0),
    (units.parse_duration, "1.5h", 5400.0),
    (units.parse_duration, "0s", 0.0),
    (units.parse_duration, "80 ms", 0.08),
    (units.parse_rate, "1Gbit/s", 125e6),
    (units.parse_rate, "450GB/s", 450e9),
    (units.parse_rate, "8bit/s", 1.0),
    (units.parse_rate, "1MiB/s", 1048576.0),
    (units.parse_size, "4MiB", 4 << 20),
    (units.parse_size, "80GiB", 80 << 30),
    (units.parse_size, "1.5KiB", 1536),
    (units.parse_size, "2MB", 2_000_000),
    (units.parse_fraction, "0.01%", 0.0001),
    (units.parse_fraction, 0.0001, 0.0001),
    (units.parse_fraction, 1, 1.0),
    (units.DISTANCE.number, "900km", 900.0),
    (units.DISTANCE.number, "350m", 0.35),
    (units.COMPUTE.number, "989TFLOP/s", 989e12),
    (units.PRICE_PER_HOUR.number, "2.5USD/h", 2.5),
    (units.PRICE_PER_BYTE.number, "0.02USD/GB", 2e-11),
]

WRONG: list[tuple[Callable[[object], float], object, str]] = [
    (units.parse_duration, 80, "want a duration in ns, us, ms, s, min, h, as 80ms; got 80 without a unit"),
    (units.parse_duration, "80", "want a duration in ns, us, ms, s, min, h, as 80ms; got '80' without a unit"),
    (units.parse_duration, True, "want a duration in ns, us, ms, s, min, h, as 80ms; got true"),
    (units.parse_duration, "fast", "want a duration in ns, us, ms, s, min, h, as 80ms; got 'fast'"),
    (units.parse_duration, "-3s", "must not be negative: '-3s'"),
    (
        units.parse_duration,
        "3 sec",
        "unknown unit 'sec' (did you mean 's'?): want a duration in ns, us, ms, s, min, h, as 80ms",
    ),
    (units.parse_size, "1.5B", "'1.5B' is not a whole number of bytes"),
    (units.parse_fraction, 1.5, "want a share of 0 to 1, or 0% to 100%; got 1.5"),
    (units.parse_fraction, "101%", "want a share of 0 to 1, or 0% to 100%; got '101%'"),
    (units.parse_fraction, "0.5", "want a share of 0 to 1, or 0% to 100%; got '0.5'"),
    (units.parse_fraction, float("nan"), "want a share of 0 to 1, or 0% to 100%; got nan"),
    (units.DISTANCE.number, [], "want a distance in m, km, as 900km; got a list"),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "value"), EXACT)
def test_a_quantity_is_read_exactly(
    parse: Callable[[object], float], text: object, value: float
) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(("parse", "text", "message"), WRONG)
def test_what_is_no_quantity_is_refused_with_the_units(
    parse: Callable[[object], float], text: object, message: str
) -> None:
    with pytest.raises(UnitError) as raised:
        parse(text)
    assert str(raised.value) == message


MEANT = [
    (units.parse_rate, "Gbps Gb/s gbit/s Gbit GBit/s Gbits", "'Gbit/s'"),
    (units.parse_rate, "Mbs mbps mb/s MBS M m", "'Mbit/s' or 'MB/s'"),
    (units.parse_rate, "MBps MB MBytes/s", "'MB/s'"),
    (units.parse_rate, "kbps", "'kbit/s'"),
    (units.parse_rate, "Kb/s KBs", "'kbit/s' or 'kB/s'"),
    (units.parse_rate, "GiB GiBps gib/s", "'GiB/s'"),
    (units.parse_size, "mb", "'MB'"),
    (units.parse_size, "M", "'MB' or 'MiB'"),
    (units.parse_size, "MIB mib", "'MiB'"),
    (units.parse_size, "KB", "'kB'"),
    (units.parse_size, "bytes", "'B'"),
    (units.parse_duration, "\N{MICRO SIGN}s \N{GREEK SMALL LETTER MU}s usec", "'us'"),
    (units.parse_duration, "MS Ms msec", "'ms'"),
    (units.parse_duration, "S sec seconds", "'s'"),
    (units.parse_duration, "m mins", "'min'"),
    (units.parse_duration, "H hrs", "'h'"),
    (units.DISTANCE.number, "KM kms", "'km'"),
    (units.COMPUTE.number, "TFLOPS tflops Tflop/s TFLOP", "'TFLOP/s'"),
    (units.PRICE_PER_HOUR.number, "$/h usd/h USD/hr", "'USD/h'"),
    (units.PRICE_PER_BYTE.number, "$/GB", "'USD/GB'"),
    (units.BDP.number, "bdp", "'BDP'"),
]


@pytest.mark.parametrize(
    ("parse", "unit", "meant"),
    [(parse, unit, meant) for parse, words, meant in MEANT for unit in words.split()],
)
def test_what_a_unit_may_mean_is_suggested_all_of_it(
    parse: Callable[[object], object], unit: str, meant: str
) -> None:
    with pytest.raises(UnitError) as raised:
        parse(f"10{unit}")
    assert f"unknown unit {unit!r} (did you mean {meant}?): " in str(raised.value)


@pytest.mark.parametrize(
    ("parse", "words"),
    [
        (units.parse_size, "Mb Gb Mbit Gib"),
        (units.parse_rate, "Gib/s Pbit/s"),
        (units.parse_duration, "d days mi"),
        (units.DISTANCE.number, "mi miles ft"),
        (units.COMPUTE.number, "EFLOPS"),
        (units.PRICE_PER_HOUR.number, "EUR/h USD/d"),
        (units.PRICE_PER_BYTE.number, "USD/MB USD/Gb"),
    ],
)
def test_no_unit_of_another_kind_or_size_is_suggested(
    parse: Callable[[object], object], words: str
) -> None:
    for unit in words.split():
        with pytest.raises(UnitError, match="unknown unit") as raised:
            parse(f"10{unit}")
        assert "did you mean" not in str(raised.value)


@given(st.integers(0, 10**9), st.sampled_from(sorted(units.SIZE.units)))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    assert units.parse_size(f"{number}{unit}") == number * units.SIZE.units[unit]


@given(
    st.decimals(0, 10**6, allow_nan=False, places=6), st.sampled_from(sorted(units.DURATION.units))
)
def test_a_duration_is_the_nearest_float_of_the_exact_value(number: object, unit: str) -> None:
    exact = Fraction(str(number)) * units.DURATION.units[unit]
    assert units.parse_duration(f"{number}{unit}") == float(exact)


FORMATS: list[tuple[Callable[[float], str], Callable[[object], float], float, float]] = [
    (units.format_duration, units.parse_duration, 1e-9, 1e7),
    (units.format_rate, units.parse_rate, 1.0, 1e14),
    (units.format_fraction, units.parse_fraction, 1e-9, 1.0),
    (units.format_distance, units.DISTANCE.number, 1e-3, 4e4),
]


@pytest.mark.parametrize(("write", "parse", "low", "high"), FORMATS)
@given(data=st.data())
def test_formats_read_back_to_four_digits(
    write: Callable[[float], str],
    parse: Callable[[object], float],
    low: float,
    high: float,
    data: st.DataObject,
) -> None:
    value = data.draw(st.floats(low, high))
    assert parse(write(value)) == pytest.approx(value, rel=6e-4), write(value)


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_is_close_and_exact_for_round_ones(size_bytes: int) -> None:
    text = units.format_size(size_bytes)
    exact = units.SIZE.parse(text)
    assert abs(exact - size_bytes) <= size_bytes * 6e-4
    if size_bytes < 1000 or size_bytes & (size_bytes - 1) == 0:
        assert exact == size_bytes


@given(st.text(max_size=20))
def test_no_text_makes_a_parser_fail_in_another_way(text: str) -> None:
    for parse, _, _ in EXACT:
        with contextlib.suppress(UnitError):
            assert parse(text) >= 0


def test_formats_of_common_figures() -> None:
    assert units.format_duration(0.062) == "62ms"
    assert units.format_duration(0) == "0s"
    assert units.format_duration(90) == "90s"
    assert units.format_rate(125e6) == "1Gbit/s"
    assert units.format_rate(999.96e3 / 8) == "1Mbit/s"
    assert units.format_size(4 << 20) == "4MiB"
    assert units.format_size(1536) == "1.5KiB"
    assert units.format_fraction(0.0001) == "0.01%"
    assert units.format_distance(900) == "900km"
