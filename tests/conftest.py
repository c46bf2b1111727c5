"""What holds for every test."""

import os
import signal

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped] # without types

from orchestrator.emulator.namespaces import netns_problem

# A shell starts background jobs with SIGINT ignored, and every child inherits that. Tests of Ctrl-C
# would then say something about the shell; with a handler here, children start with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MEASURED_SEEDS = 3
RUNS = "tests/multiprocess/"


class RunsInOnePlace(LoadScopeScheduling):  # type: ignore[misc] # without types
    """Gives whole runs to one worker: two at a time would only wait for each other's processors.

    A scheduler and not xdist's groups, for these have no effect with pytest 9.2: xdist 3.8 writes
    them into an attribute that is not read any more.
    """

    def _split_scope(self, nodeid: str) -> str:
        """Return what goes to one worker together; every other test goes by itself."""
        return RUNS if nodeid.startswith(RUNS) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> RunsInOnePlace:
    """Have xdist hand out tests like that."""
    return RunsInOnePlace(config, log)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Say of a test what follows from where it is, and of what it is given."""
    if _runs_lines_of_others(item):
        item.add_marker(pytest.mark.no_cover)


def _runs_lines_of_others(item: pytest.Item) -> bool:
    """Whether measuring a test's coverage tells nothing: it takes two and a half times as long.

    Slow tests of what is pure search and simulate for seconds what quick ones do in little; of a
    test with many seeds, the first ones run about every line that the others do.
    """
    if "topology" in item.path.parts and item.get_closest_marker("slow"):
        return True
    given = getattr(item, "callspec", None)  # of a test with parameters
    seed = given.params.get("seed") if given else None
    return isinstance(seed, int) and seed >= MEASURED_SEEDS


@pytest.fixture(scope="session")
def needs_netns() -> None:
    """Skip where no network namespaces can be made."""
    if why := netns_problem():
        pytest.skip(why)


@pytest.fixture(scope="session")
def needs_root_netns(needs_netns: None) -> None:
    """Skip where they take more than this user may."""
    if os.geteuid() != 0:
        pytest.skip("these tests take root")
