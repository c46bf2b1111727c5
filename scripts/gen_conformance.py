#!/usr/bin/env python3
"""Write what tests/conformance proves into docs/conformance.md: what works, what is refused.

Usage: python scripts/gen_conformance.py [--check]
With --check nothing is written: exit 1 when the page is out of date.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.conformance.case import BOTH, Case, Refused, Way  # noqa: E402
from tests.conformance.registry import CASES, GROUPS  # noqa: E402

PAGE = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- made by scripts/gen_conformance.py -->", "<!-- end -->"
WAYS = {"ddp": "DDP", "fsdp2": "FSDP2", "average": "`average_gradients`", "lone": "no wrapper"}


def section() -> str:
    """Return what stands between the marks."""
    header = ["| | with | scripts |", "|---|---|---|"]
    lines = ["**Trains as one process would:**", "", *header]
    for group in GROUPS:
        cases = [each for each in CASES.values() if each.script.__module__ == group.__name__]
        heading = (group.__doc__ or "").strip().rstrip(".")
        lines += _listed(heading, cases, _is_equal)
    lines += ["", "**Refused by name:**", "", "| error | scripts |", "|---|---|"]
    lines += [f"| `{error}` | {of} |" for error, of in _refusals()]
    wrong = _listed("Tried", [*CASES.values()], lambda case, way: way in case.broken)
    if wrong:
        lines += ["", "**Wrong today, or not said by name:**", "", *header, *wrong]
    return "\n".join(lines)


def _listed(heading: str, cases: list[Case], holds: Callable[[Case, Way], bool]) -> list[str]:
    """Return a row for each of the ways in which cases were tried."""
    titles: dict[str, list[str]] = {}
    for case in cases:
        ways = [way for way in case.ways if holds(case, way)]
        if ways:
            titles.setdefault(_named(ways), []).append(case.title)
    return [f"| {heading} | {ways} | {'; '.join(of)} |" for ways, of in titles.items()]


def _is_equal(case: Case, way: Way) -> bool:
    return way not in case.broken and not isinstance(case.holds[way], Refused)


def _refusals() -> Iterator[tuple[str, str]]:
    """Yield each error, with the scripts that it refuses."""
    titles: dict[str, list[str]] = {}
    for case in CASES.values():
        errors: dict[str, list[Way]] = {}
        for way, holds in case.holds.items():
            if isinstance(holds, Refused) and way not in case.broken:
                errors.setdefault(holds.error, []).append(way)
        for error, ways in errors.items():
            titles.setdefault(error, []).append(f"{case.title} ({_named(ways)})")
    for error, of in titles.items():
        yield error, "; ".join(of)


def _named(ways: list[Way]) -> str:
    return " and ".join(WAYS[each] for each in (ways if len(ways) < 3 else BOTH))


def main(argv: list[str]) -> int:
    """Write the lists, or with --check compare them with what is committed."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n{section()}\n{END}{after}"
    if argv != ["--check"]:
        PAGE.write_text(made, encoding="utf-8")
    elif made != text:
        print(f"stale: {PAGE.relative_to(ROOT)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
