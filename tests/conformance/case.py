"""What a case of the conformance suite is: a script as people write it, and what must come of it.

A script trains at several sites, and is right if it ends where one process would that has the data
of all of them; else the run says by name what it cannot do. There is nothing between: a script that
ends well with other numbers, or waits for ever, is a defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.conformance.world import World

Way = Literal["ddp", "fsdp2", "average", "lone"]
"""How gradients cross: DistributedDataParallel, `fully_shard`, `site.average_gradients`, or nothing
wraps the model at the first site at least."""
DDP: tuple[Way, ...] = ("ddp",)
FSDP2: tuple[Way, ...] = ("fsdp2",)
BOTH: tuple[Way, ...] = ("ddp", "fsdp2")
AVERAGE: tuple[Way, ...] = ("average",)
LONE: tuple[Way, ...] = ("lone",)
Kind = Literal["sync", "delayed", "diloco", "streaming"]
"""The kinds of regime."""
REGIMES: Mapping[Kind, tuple[str, ...]] = {
    "sync": (),
    "delayed": ("regime=delayed",),
    # By plain averaging, sites that have the same data train as one process does.
    "diloco": (
        "regime.kind=diloco",
        "regime.sync_every=2",
        "regime.outer.lr=1",
        "regime.outer.momentum=0",
    ),
    "streaming": (
        "regime.kind=streaming",
        "regime.sync_every=4",
        "regime.fragments=2",
        "regime.delay=1",
    ),
}
"""Settings of the job for each, as `--set` has them."""
EACH_STEP = ("regime.sync_every=1", "regime.fragments=1", "regime.delay=0")
"""Further ones where a run goes on from any step: all sites hold the same after each."""
STEPS = 4
"""Optimizer steps of a script, unless it says another number."""
CASE_S = 40.0
"""A case takes a second. Who has not ended by then waits for ever."""

Script = Callable[[World], Any]
"""Trains, and returns what it has learnt: a module, several, or named tensors."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The error that ends the run in place of wrong numbers."""

    error: str
    """A code of docs/errors.md, or the type of an exception: a regular expression."""
    text: str
    """Some of what it says: a regular expression."""


NAMES_REGIME = Refused("ScriptError|TypeError|RuntimeError", r"\bregime\b|\bshards\b")
"""It says by name that the regime, which cuts models as shards are cut, cannot do that."""
EQUAL: Literal["equal"] = "equal"
"""It is what one process learns."""
ALIKE: Literal["alike"] = "alike"
"""It is the same at all ranks."""
FINITE: Literal["finite"] = "finite"
"""It is anything but NaN, and the coordinator sees nothing that differs."""
Outcome = Refused | Literal["equal", "alike", "finite"]


APART: Mapping[Kind, Outcome] = {"diloco": ALIKE}
"""What comes of a script that differs by site, where all sites have the same data."""


def in_regimes(outcome: Outcome) -> Mapping[Kind, Outcome]:
    """Return what comes of a script that ends alike in all regimes beside sync."""
    return {kind: outcome for kind in REGIMES if kind != "sync"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script, and what holds for it."""

    script: Script
    ways: tuple[Way, ...]
    holds: Mapping[Way, Outcome]
    broken: Mapping[Way, str]
    """Why it does not hold today."""
    quick_ways: tuple[Way, ...]
    """Those that run in `./scripts/test`; all others with `--all` only."""
    ranks: tuple[int, ...]
    """Of each site."""
    job: tuple[str, ...]
    """Settings of the job file, as `--set` has them."""
    oracle: Script
    """What one process does, where that is not the same script."""
    steps: int | None
    """Optimizer steps that the run counts; None: any number."""
    within_s: float
    early_ranks: tuple[int, ...]
    """Those that end before the others, who go on without them; what they learn is not compared."""
    beside: Mapping[Kind, Outcome]
    """What holds in regimes, where that is not as usual."""
    resumes_at: int | None
    """The run goes on from its own checkpoint of that step; None: it saves nothing."""

    def outcomes(self, kind: Kind, way: Way) -> tuple[Outcome, ...]:
        """Return what may come of it where the job has a regime of this kind.

        Beside `sync`, what is refused there may be right, and what names the regime is a refusal.
        """
        holds = self.holds[way]
        if kind == "sync":
            return (holds,)
        if kind in self.beside:
            return (self.beside[kind],)
        if isinstance(holds, Refused):
            return (holds, NAMES_REGIME, FINITE if kind == "streaming" else ALIKE)
        if kind == "diloco" and len({*self.ranks}) == 1:
            return (NAMES_REGIME, EQUAL)
        return (NAMES_REGIME, FINITE if kind == "streaming" else ALIKE)

    @property
    def has_regime(self) -> bool:
        """Whether the job says its regime itself."""
        return any(each.startswith("regime") for each in self.job)

    def settings(self, kind: Kind) -> tuple[str, ...]:
        """Return the job's, in a regime of this kind."""
        has_rounds = kind in ("diloco", "streaming") and self.resumes_at is not None
        more = EACH_STEP[: 1 if kind == "diloco" else 3] if has_rounds else ()
        return (*self.job, *REGIMES[kind], *more)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.script.__name__

    @property
    def module(self) -> str:
        """The last part of the name of its module: a group of cases."""
        return self.script.__module__.rpartition(".")[2]

    @property
    def title(self) -> str:
        """What it shows: the first line of the script's docstring, without its full stop."""
        return (self.script.__doc__ or "").strip().partition("\n")[0].removesuffix(".")


CASES: dict[str, Case] = {}


def case(
    ways: Iterable[Way] = DDP,
    holds: Outcome | Mapping[Way, Outcome] = EQUAL,
    *,
    broken: str | Mapping[Way, str] = "",
    quick: Iterable[Way] | bool = (),
    ranks: tuple[int, ...] = (1, 1),
    job: tuple[str, ...] = (),
    oracle: Script | None = None,
    steps: int | None = STEPS,
    within_s: float = CASE_S,
    early_ranks: tuple[int, ...] = (),
    beside: Mapping[Kind, Outcome] | None = None,
    resumes_at: int | None = None,
) -> Callable[[Script], Script]:
    """Add a script to the suite.

    `holds` and `broken` may differ by way. `quick`: in which ways it is; True: in all.
    """
    taken = tuple(ways)

    def add(script: Script) -> Script:
        made = Case(
            script=script,
            ways=taken,
            holds=holds if isinstance(holds, Mapping) else dict.fromkeys(taken, holds),
            broken=(
                broken
                if isinstance(broken, Mapping)
                else dict.fromkeys(taken if broken else (), broken)
            ),
            quick_ways=taken if quick is True else tuple(quick or ()),
            ranks=ranks,
            job=job,
            oracle=oracle or script,
            steps=steps,
            within_s=within_s,
            early_ranks=early_ranks,
            beside=beside or {},
            resumes_at=resumes_at,
        )
        assert made.name not in CASES, f"two cases are called {made.name}"
        assert made.title, f"{made.name} says nothing of what it shows"
        CASES[made.name] = made
        return script

    return add
