"""docs/conformance.md says what the suite proves."""

from scripts import gen_conformance


def test_the_page_is_what_the_cases_say() -> None:
    assert gen_conformance.main(["--check"]) == 0, "run scripts/gen_conformance.py"
