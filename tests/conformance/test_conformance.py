"""Scripts as people write them: each trains as one process would, or is refused by name.

Beside `sync`, what a script learns is compared with that of one process where the regime's result
is the same: sites that have the same data average nothing away. Else all sites learn the same, or
come to an end with numbers and without an error.
"""

from pathlib import Path

import pytest

from tests.conformance.case import REGIMES, Case, Kind, Way
from tests.conformance.pool import Pool, check
from tests.conformance.registry import CASES

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.no_cover]

QUICK = {"plain_loop", "one_site_counts_nothing"}
"""Cases that run in each regime in `./scripts/test`, too."""


def _parameters() -> list[object]:
    found = []
    for case in CASES.values():
        for way in case.ways:
            marks = [] if way in case.quick_ways else [pytest.mark.exhaustive]
            if way in case.broken:
                marks.append(pytest.mark.xfail(strict=True, reason=case.broken[way]))
            found.append(pytest.param(case, way, marks=marks, id=f"{case.name}-{way}"))
    return [*found]


def _beside_sync() -> list[object]:
    found = []
    for case in CASES.values():
        ways = [way for way in case.ways if way != "average" and way not in case.broken]
        for kind in [] if case.has_regime else [*REGIMES][1:]:
            for way in ways:
                is_quick = case.name in QUICK and way == "ddp"
                marks = [] if is_quick else [pytest.mark.exhaustive]
                name = f"{case.name}-{way}-{kind}"
                found.append(pytest.param(case, way, kind, marks=marks, id=name))
    return [*found]


@pytest.mark.parametrize(("case", "way"), _parameters())
def test_it_is_equal_or_refused(pool: Pool, tmp_path: Path, case: Case, way: Way) -> None:
    check(case, way, pool.run(case, way, tmp_path))


@pytest.mark.parametrize(("case", "way", "kind"), _beside_sync())
def test_it_is_right_or_refused_in_other_regimes(
    pool: Pool, tmp_path: Path, case: Case, way: Way, kind: Kind
) -> None:
    check(case, way, pool.run(case, way, tmp_path, kind), kind)
