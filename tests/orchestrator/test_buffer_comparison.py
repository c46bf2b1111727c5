from isthmus.orchestrator.core.buffer_comparison import KEPT_STEPS, BufferComparison


def test_the_first_buffer_that_differs_is_named_once() -> None:
    comparison = BufferComparison()
    assert comparison.report("b", 2, {"gate.bias": 1.0, "table": 5.0}) == ""
    note = comparison.report("a", 2, {"gate.bias": 2.0, "table": 6.0})
    assert note.startswith("buffer gate.bias differs between sites a and b after step 2")
    assert comparison.report("a", 4, {"gate.bias": 1.0}) == ""
    assert comparison.report("b", 4, {"gate.bias": 2.0}) == ""


def test_equal_buffers_and_those_that_a_site_does_not_have_say_nothing() -> None:
    comparison = BufferComparison()
    for step in range(3 * KEPT_STEPS):
        for site, more in (("a", {}), ("b", {"stage": 1.0}), ("c", {"head": 2.0})):
            assert comparison.report(site, step, {"bias": float(step), **more}) == ""


def test_a_site_that_is_far_behind_is_not_compared() -> None:
    comparison = BufferComparison()
    for step in range(KEPT_STEPS + 1):
        assert comparison.report("a", step, {"bias": 1.0}) == ""
    assert comparison.report("b", 0, {"bias": 2.0}) == ""
    assert comparison.report("b", 1, {"bias": 2.0}) != ""
