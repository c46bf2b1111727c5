import random

import pytest

from isthmus.orchestrator.core.parameter_digests import WINDOW_STEPS, Difference, DigestComparison

NAMES = ("embedding", "1.weight", "2.weight")


def report(
    digests: DigestComparison, site: str, rank: int, step: int, second: int = 2, third: int = 3
) -> Difference | None:
    tensors = (1, second, third)
    return digests.report(site, rank, step, hash(tensors), tensors, NAMES)


def test_equal_hashes_verify_a_step() -> None:
    digests = DigestComparison({"a": 2, "b": 1})
    for step in (0, 10, 20):
        for site, rank in (("a", 0), ("a", 1), ("b", 0)):
            assert report(digests, site, rank, step) is None
    assert digests.verified_steps == 3
    assert digests.flush() is None


def test_a_majority_names_the_odd_one_out() -> None:
    digests = DigestComparison({"a": 1, "b": 1, "c": 1})
    assert report(digests, "b", 0, 10, third=99) is None
    assert report(digests, "a", 0, 10) is None
    found = report(digests, "c", 0, 10)
    assert found is not None
    assert (found.step, found.tensor, found.sites) == (10, "2.weight", ("b",))
    assert found.replicas == (("b", 0),)
    assert "'2.weight' differs at site b rank 0 from all others" in str(found)


def test_of_two_nobody_can_say_which_is_wrong() -> None:
    digests = DigestComparison({"a": 1, "b": 1})
    assert report(digests, "a", 0, 10) is None
    found = report(digests, "b", 0, 10, second=7)
    assert found is not None
    assert (found.tensor, found.sites, found.is_majority) == ("1.weight", ("a", "b"), False)


def test_without_a_majority_all_are_named() -> None:
    digests = DigestComparison({"a": 2, "b": 2})
    for rank in (0, 1):
        assert report(digests, "a", rank, 10) is None
    assert report(digests, "b", 0, 10, second=8) is None
    found = report(digests, "b", 1, 10, second=8)
    assert found is not None
    assert found.sites == ("a", "b")


def test_many_ranks_of_one_site_do_not_outvote_others() -> None:
    """Ranks that hold shards of one whole are all wrong if one of them is."""
    digests = DigestComparison({"a": 4, "b": 1})
    for rank in range(4):
        assert report(digests, "a", rank, 10, second=8) is None
    found = report(digests, "b", 0, 10)
    assert found is not None
    assert (found.sites, found.is_majority) == (("a", "b"), False)
    of_three = DigestComparison({"a": 4, "b": 1, "c": 1})
    assert report(of_three, "a", 0, 10, second=8) is None
    assert report(of_three, "b", 0, 10) is None
    found = report(of_three, "c", 0, 10)
    assert found is not None
    assert (found.sites, found.is_majority) == (("a",), True)


def test_hashes_that_do_not_tell_tensors_still_differ() -> None:
    digests = DigestComparison({"a": 1, "b": 1})
    assert digests.report("a", 0, 1, 5, (), ()) is None
    found = digests.report("b", 0, 1, 6, (), ())
    assert found is not None
    assert found.tensor == ""
    assert "the parameters differ between" in str(found)


def test_repeated_late_and_impossible_reports_change_nothing() -> None:
    digests = DigestComparison({"a": 1, "b": 1})
    assert report(digests, "a", 0, 1) is None
    assert report(digests, "a", 0, 1, second=9) is None
    assert report(digests, "c", 0, 1, second=9) is None
    assert report(digests, "b", 1, 1, second=9) is None
    assert report(digests, "b", 0, 1) is None
    assert report(digests, "b", 0, 1, second=9) is None
    assert digests.verified_steps == 1


def test_open_steps_are_bounded_and_a_difference_is_not_forgotten() -> None:
    digests = DigestComparison({"a": 1, "b": 1, "c": 1})
    assert report(digests, "a", 0, 0) is None
    assert report(digests, "b", 0, 0, second=9) is None
    found = [report(digests, "a", 0, step) for step in range(1, WINDOW_STEPS + 1)]
    assert found[:-1] == [None] * (WINDOW_STEPS - 1)
    assert found[-1] is not None
    assert found[-1].step == 0


def test_flush_tells_of_a_difference_that_some_rank_never_reported_on() -> None:
    digests = DigestComparison({"a": 1, "b": 1, "c": 1})
    report(digests, "a", 0, 5)
    report(digests, "b", 0, 5, third=9)
    found = digests.flush()
    assert found is not None
    assert (found.step, found.sites) == (5, ("a", "b"))


@pytest.mark.parametrize("seed", range(20))
def test_in_every_order_the_one_flipped_rank_is_found(seed: int) -> None:
    draw = random.Random(seed)
    ranks = [(site, rank) for site in "abc" for rank in range(2)]
    odd, bad_step = draw.choice(ranks), 1 + draw.randrange(5)
    reports = [(step, *each) for step in range(1, 6) for each in ranks]
    draw.shuffle(reports)
    digests = DigestComparison(dict.fromkeys("abc", 2))
    found = None
    for step, site, rank in reports:
        flipped = step == bad_step and (site, rank) == odd
        found = report(digests, site, rank, step, second=77 if flipped else 2) or found
    assert found is not None, f"{seed=}"
    assert (found.step, found.replicas, found.tensor) == (bad_step, (odd,), "1.weight"), f"{seed=}"
    assert digests.verified_steps == 4, f"{seed=}"


def test_a_tensor_that_not_all_have_is_named_with_those_who_lack_it() -> None:
    digests = DigestComparison({"a": 2, "b": 1, "c": 1})
    grown = ((1, 2, 3, 4), (*NAMES, "head.weight"))
    for rank in (0, 1):
        assert digests.report("a", rank, 10, hash(grown), *grown) is None
    assert report(digests, "b", 0, 10) is None
    found = digests.report("c", 0, 10, hash(grown), *grown)
    assert found is not None
    assert (found.tensor, found.lacking, found.sites) == ("head.weight", (("b", 0),), ("b",))
    assert "'head.weight' is not there at site b rank 0, and elsewhere it is" in str(found)


def test_tensors_of_other_names_are_told_before_other_values() -> None:
    digests = DigestComparison({"a": 1, "b": 1})
    assert report(digests, "a", 0, 10, second=9) is None
    names = ("embedding", "1.weight", "1.up")
    found = digests.report("b", 0, 10, hash(names), (1, 2, 3), names)
    assert found is not None
    assert (found.tensor, found.lacking) == ("2.weight", (("b", 0),))
