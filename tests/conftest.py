"""What holds for every test."""

import argparse
import gc
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped] # without types

from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from scripts.environment import ensure_compiled
from tests.fakes.reaper import MARK, begin
from tests.fakes.s3 import S3, SETTINGS, s3_server

ROOT = Path(__file__).resolve().parents[1]

# A shell starts background jobs with SIGINT ignored, and every child inherits that. Tests of Ctrl-C
# would then say something about the shell; with a handler here, children start with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What processes of one user share as their secret is, in tests, a file of their own.
os.environ["ISTHMUS_TOKEN_FILE"] = str(
    Path(tempfile.gettempdir(), f"isthmus-tests-{os.getuid()}", "token")
)

# Children find tests.fakes, too: ours start with -P, without the folder in which they start.
os.environ["PYTHONPATH"] = os.pathsep.join(
    each for each in (str(ROOT), os.environ.get("PYTHONPATH")) if each
)

# Every run tries the same examples. They take longer while other tests run beside them.
settings.register_profile("isthmus", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("isthmus")

FEW_SEEDS = 3
"""A run without `--all` takes so many seeds of a test."""
FEW_SLOW_SEEDS = 1
"""A run without `--all` takes so many seeds of a slow test."""
DRAWN_LIMIT_S = 240.0
"""Tests that may take longer are not drawn."""
RUNS = "tests/multiprocess/"
RANKS = re.compile(r"import .*\brun_ranks\b|from tests\.fakes\.two_sites|test_sharded_checkpoints")
"""What stands in a file of tests whose ranks are forked from a server that takes long to start."""
PURE = {"topology", "sim"}
"""Folders of tests that only compute. With coverage they take three times as long."""


@pytest.fixture(scope="session")
def s3() -> Generator[S3]:
    """An S3 server, which all processes of a test find by their environment."""
    with s3_server() as server, pytest.MonkeyPatch.context() as environment:
        for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": server.address}.items():
            environment.setenv(name, value)
        yield server


REAPER = pytest.StashKey[subprocess.Popen[bytes]]()
INTERRUPTED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Compile what has changed. Have what tests start ended, should pytest be killed."""
    worker = getattr(config, "workerinput", None)
    if worker is None:  # xdist's processes come after
        ensure_compiled(Path(sys.executable))
    elif config.args == config.getini("testpaths"):
        place = int(worker["workerid"].removeprefix("gw"))
        config.args = _from_elsewhere(place / worker["workercount"])
    reaper = begin()
    if reaper is not None:
        config.stash[REAPER] = reaper


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note whether tests were interrupted, and could not look after what they have started."""
    session.config.stash[INTERRUPTED] = exitstatus == pytest.ExitCode.INTERRUPTED


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what interrupted tests have left; all others look after what they start."""
    reaper = config.stash.get(REAPER, None)
    if reaper is not None:
        reaper.communicate(b"" if config.stash.get(INTERRUPTED, False) else b".", timeout=30)
        del os.environ[MARK]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`: every seed, and what is marked `exhaustive`; and parts of what that adds."""
    parser.addoption("--all", action="store_true", help="all seeds and exhaustive tests, too")
    parser.addoption("--shard", metavar="K/N", type=_shard, help="of what --all adds, this part")
    parser.addoption("--draw", type=int, default=0, help="so many of what --all adds")
    parser.addoption("--draw-seed", default="", help="decides which")


def _shard(text: str) -> tuple[int, int]:
    """Return K and N of `K/N`."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 1 to N, not {text!r}")
    return int(found[1]), int(found[2])


def _from_elsewhere(start: float) -> list[str]:
    """Return where tests are, beginning with another part of it.

    Each of xdist's processes imports all tests. Most of that is compiling them, and one finds
    compiled what another began with.
    """
    places = sorted(
        str(path)
        for path in (ROOT / "tests").iterdir()
        if path.match("test_*.py") or any(path.glob("test_*.py"))
    )
    at = int(start * len(places))
    return places[at:] + places[:at]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Keep the garbage collector off the millions of objects of tests and modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out later seeds and exhaustive tests, unless `--all` asks for them."""
    if hasattr(config, "workerinput"):  # each began in another place
        starting = {item.path for item in items if item.get_closest_marker("multiprocess")}
        items.sort(
            key=lambda item: (
                not item.nodeid.startswith(RUNS),
                item.path not in starting,
                str(item.path),
            )
        )
    shard = config.getoption("--shard")
    if config.getoption("--all") and shard is None:
        return
    kept: list[pytest.Item] = []
    added: list[pytest.Item] = []
    seeds_by_test: dict[str, set[object]] = {}
    for item in items:
        seeds = seeds_by_test.setdefault(item.nodeid.partition("[")[0], set())
        (added if _is_for_all(item, seeds) else kept).append(item)
    if shard is not None:
        place, num_shards = shard
        chosen = set(added[place - 1 :: num_shards])  # neighbours take about as long
    else:
        quick = [item for item in added if _limit_s(item) <= DRAWN_LIMIT_S]
        drawn = random.Random(config.getoption("--draw-seed"))
        chosen = {*kept, *drawn.sample(quick, min(config.getoption("--draw"), len(quick)))}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _limit_s(item: pytest.Item) -> float:
    """Return the time limit of a test."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark and mark.args else float(item.config.getini("timeout"))


def _is_for_all(item: pytest.Item, seeds: set[object]) -> bool:
    """Return whether only `--all` runs a test; add its seed to those that are taken."""
    if item.get_closest_marker("exhaustive"):
        return True
    given = getattr(item, "callspec", None)  # of a test with parameters
    seed = given.params.get("seed") if given else None
    if seed is None or seed in seeds:
        return False
    if len(seeds) == (FEW_SLOW_SEEDS if item.get_closest_marker("slow") else FEW_SEEDS):
        return True
    seeds.add(seed)
    return False


class InOnePlace(LoadScopeScheduling):  # type: ignore[misc] # without types
    """Gives whole runs to one worker: two at a time would only wait for each other's processors.

    And what forks ranks to another one, for a server takes seconds of a processor to start; the
    rest by files, in the order of the collection: files without processes come last, and are short.
    A unit for each test would cost xdist as much again as the tests that are quickest.

    A scheduler and not xdist's groups, for these have no effect with pytest 9.2: xdist 3.8 writes
    them into an attribute that is not read any more.
    """

    def __init__(self, *arguments: object) -> None:
        """Have no test yet."""
        super().__init__(*arguments)
        self._units: dict[str, str] = {}
        """By file."""

    def _split_scope(self, nodeid: str) -> str:
        """Return what goes to one worker together: whole runs, all that forks ranks, or a file."""
        path = nodeid.partition("::")[0]
        if path not in self._units:
            forks = RANKS.search((ROOT / path).read_text()) is not None
            self._units[path] = RUNS if path.startswith(RUNS) else "ranks" if forks else path
        return self._units[path]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> InOnePlace:
    """Have xdist hand out tests like that."""
    return InOnePlace(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Do not measure the coverage of what tests that only compute share."""
    return (yield from _unmeasured(_says_no_cover(item) or _is_pure(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Do not measure the coverage of tests that run lines of others.

    Slow tests that only compute do for seconds what quick ones do in little.
    """
    is_slow = item.get_closest_marker("slow") is not None
    return (yield from _unmeasured(_says_no_cover(item) or (is_slow and _is_pure(item))))


def _says_no_cover(item: pytest.Item) -> bool:
    """Whether a test says `no_cover`: pytest-cov 7.1 knows nothing of it in xdist's processes."""
    return item.get_closest_marker("no_cover") is not None


def _is_pure(item: pytest.Item) -> bool:
    """Whether a test only computes, by its folder."""
    return not PURE.isdisjoint(item.path.parts)


def _unmeasured(is_unmeasured: bool) -> Generator[None]:
    """Go on with a hook, with coverage or without."""
    coverage = Coverage.current() if is_unmeasured else None
    if coverage is None:
        return (yield)
    # Not `stop`: in xdist's processes another one would then go on, which they began with.
    collector = coverage._collector
    assert collector is not None, "it has been started"
    collector.pause()
    try:
        return (yield)
    finally:
        collector.resume()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run in asyncio, as the product does."""
    return "asyncio"


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
