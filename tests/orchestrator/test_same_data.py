from isthmus.orchestrator.core.same_data import WINDOW_STEPS, SameDataWatch


def test_sites_are_told_in_one_order_whoever_was_heard_first() -> None:
    watch = SameDataWatch()
    assert watch.report("b", 3, 17) is None
    found = watch.report("a", 3, 17)
    assert found is not None
    assert found.sites == ("a", "b")


def test_different_gradients_say_nothing() -> None:
    watch = SameDataWatch()
    for step in range(1, 200):
        for number, site in enumerate("abc"):
            assert watch.report(site, step, 10 * step + number + 1) is None


def test_equal_gradients_of_a_step_name_both_sites() -> None:
    watch = SameDataWatch()
    assert watch.report("a", 1, 7) is None
    assert watch.report("b", 1, 8) is None
    found = watch.report("c", 1, 7)
    assert found is not None
    assert (found.step, found.sites, found.times) == (1, ("a", "c"), 1)
    assert "sites a and c had the same gradient in step 1" in str(found)


def test_each_step_counts_once_however_many_sites_are_alike() -> None:
    watch = SameDataWatch()
    times = []
    for step in (1, 2):
        for site in "abc":
            found = watch.report(site, step, 7)
            if found is not None:
                times.append(found.times)
    assert times == [1, 2]


def test_what_a_site_says_twice_is_no_second_site() -> None:
    watch = SameDataWatch()
    assert watch.report("a", 1, 7) is None
    assert watch.report("a", 1, 7) is None


def test_zeros_are_equal_everywhere_and_say_nothing() -> None:
    watch = SameDataWatch()
    assert watch.report("a", 1, 0) is None
    assert watch.report("b", 1, 0) is None


def test_equal_hashes_of_different_steps_say_nothing() -> None:
    watch = SameDataWatch()
    assert watch.report("a", 1, 7) is None
    assert watch.report("b", 2, 7) is None


def test_a_site_that_is_far_behind_is_not_compared() -> None:
    watch = SameDataWatch()
    for step in range(1, WINDOW_STEPS + 2):
        assert watch.report("a", step, step) is None
    assert watch.report("b", 1, 1) is None
    found = watch.report("b", 2, 2)
    assert found is not None
