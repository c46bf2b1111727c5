"""Scripts as people write them: each trains as one process would, or is refused by name."""

from pathlib import Path

import pytest

from tests.conformance.case import Case, Way
from tests.conformance.pool import Pool, check
from tests.conformance.registry import CASES

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.no_cover]


def _parameters() -> list[object]:
    found = []
    for case in CASES.values():
        for way in case.ways:
            marks = [] if way in case.quick_ways else [pytest.mark.exhaustive]
            if way in case.broken:
                marks.append(pytest.mark.xfail(strict=True, reason=case.broken[way]))
            found.append(pytest.param(case, way, marks=marks, id=f"{case.name}-{way}"))
    return [*found]


@pytest.mark.parametrize(("case", "way"), _parameters())
def test_it_is_equal_or_refused(pool: Pool, tmp_path: Path, case: Case, way: Way) -> None:
    check(case, way, pool.run(case, way, tmp_path))
