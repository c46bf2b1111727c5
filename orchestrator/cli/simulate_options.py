"""The options of `isthmus simulate` that say how, and the settings that they come to."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import click

from orchestrator.cli.options import Duration, all_of
from topology.simulator.chance import DISTRIBUTIONS, Stragglers
from topology.simulator.outages import Outages
from topology.simulator.rounds import BUCKETS_MAX, Rounds
from topology.simulator.settings import SHARINGS, Settings
from topology.units import UnitError, parse_fraction

STEPS, WARMUP_STEPS, CHECKPOINT_EVERY = 20, 5, 100
"""Where nothing is said; of rounds, as many whole ones as that takes."""
_ROUNDS_MIN = 2
"""That count: of one, the mean of what comes and goes at its ends would say little."""
_STEPS_MAX = 100_000
_ROUND_STEPS_MAX = 10_000
_FRAGMENTS_MAX = BUCKETS_MAX


class StragglersType(click.ParamType[Stragglers]):
    """DISTRIBUTION:SPREAD, as exponential:5%."""

    name = "distribution:spread"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Stragglers:
        """Check both parts."""
        if isinstance(value, Stragglers):
            return value
        distribution, _, spread = str(value).partition(":")
        if distribution not in DISTRIBUTIONS:
            wanted = ", ".join(DISTRIBUTIONS)
            self.fail(f"want one of {wanted}, as exponential:5%; got {value!r}", param, ctx)
        try:
            return Stragglers(distribution, parse_fraction(spread))
        except UnitError as error:
            self.fail(f"{error}, as {distribution}:5%", param, ctx)


_OPTIONS = (
    click.option(
        "--steps",
        type=click.IntRange(1, _STEPS_MAX),
        help=f"That count. [{STEPS}; of rounds, whole ones, {_ROUNDS_MIN} at least]",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0, _STEPS_MAX),
        help=f"Steps before those. [{WARMUP_STEPS}; of rounds, whole ones]",
    ),
    click.option(
        "--seed",
        type=int,
        help="Of stragglers and failures, and a fault script's times. [0; its own]",
    ),
    click.option(
        "--sharing",
        type=click.Choice(SHARINGS),
        default=SHARINGS[0],
        show_default=True,
        help="How a link serves what waits for it: bucket by bucket, "
        "or a few at once in equal shares.",
    ),
    click.option(
        "--slow-start/--no-slow-start",
        "slow_start",
        default=None,
        help="TCP starts slowly after a pause. [where packets cross: not with the relay]",
    ),
    click.option(
        "--local-steps",
        type=click.IntRange(1, _ROUND_STEPS_MAX),
        help="DiLoCo: sites train by themselves for so many steps, then exchange their parameters. "
        "[gradients in every step]",
    ),
    click.option(
        "--fragments",
        type=click.IntRange(1, _FRAGMENTS_MAX),
        help="Streaming: that many parts of the model are exchanged one after another in a round. "
        "[1]",
    ),
    click.option(
        "--overlap-steps",
        type=click.IntRange(0, _ROUND_STEPS_MAX),
        help="Streaming: a part's exchange goes on during so many further steps. [0]",
    ),
    click.option(
        "--stragglers",
        type=StragglersType(),
        help="By how much ranks are slower, step by step: "
        f"{', '.join(DISTRIBUTIONS)}, and a share.",
    ),
    click.option(
        "--mtbf",
        "mtbf_s",
        type=Duration(),
        help="Mean time between failures of one site. [none fails]",
    ),
    click.option(
        "--recovery",
        "recovery_s",
        type=Duration(),
        default="5min",
        show_default=True,
        help="From a failure until all sites compute again.",
    ),
    click.option(
        "--checkpoint-every",
        type=click.IntRange(1, 1_000_000),
        help=f"Steps; what was done since is done again after a failure. [{CHECKPOINT_EVERY}; of "
        "rounds, whole ones]",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The values of those options, by their names."""

    steps: int | None
    warmup: int | None
    seed: int | None
    sharing: str
    slow_start: bool | None
    local_steps: int | None
    fragments: int | None
    overlap_steps: int | None
    stragglers: Stragglers | None
    mtbf_s: float | None
    recovery_s: float
    checkpoint_every: int | None

    def settings(self) -> tuple[Settings, int]:
        """Return how a job is simulated, and the steps of it that do not count.

        Raises:
            UsageError: the options do not fit each other.
        """
        rounds = self._rounds()
        warmup = self._whole("--warmup", self.warmup, WARMUP_STEPS, rounds)
        steps = self._whole(
            "--steps", self.steps, STEPS, rounds, _ROUNDS_MIN * (rounds.steps if rounds else 0)
        )
        outages = None
        if self.mtbf_s is not None:
            if self.mtbf_s <= 0:
                raise click.UsageError("--mtbf: want more than 0")
            outages = Outages(
                mtbf_s=self.mtbf_s,
                recovery_s=self.recovery_s,
                checkpoint_every=self._whole(
                    "--checkpoint-every", self.checkpoint_every, CHECKPOINT_EVERY, rounds
                ),
            )
        settings = Settings(
            steps=warmup + steps,
            seed=self.seed or 0,
            sharing=self.sharing,
            slow_start=self.slow_start,
            stragglers=self.stragglers,
            outages=outages,
            rounds=rounds,
        )
        return settings, warmup

    def _rounds(self) -> Rounds | None:
        if self.local_steps is None:
            for name, value in (
                ("--fragments", self.fragments),
                ("--overlap-steps", self.overlap_steps),
            ):
                if value is not None:
                    raise click.UsageError(f"{name} has no use without --local-steps, its round")
            return None
        fragments, overlap_steps = self.fragments or 1, self.overlap_steps or 0
        if fragments > self.local_steps:
            raise click.UsageError(
                f"--fragments: want at most {self.local_steps}, the steps of a round; "
                f"got {fragments}"
            )
        if overlap_steps > self.local_steps:
            raise click.UsageError(
                f"--overlap-steps: want at most {self.local_steps}, the steps of a round; "
                f"got {overlap_steps}"
            )
        return Rounds(steps=self.local_steps, fragments=fragments, overlap_steps=overlap_steps)

    @staticmethod
    def _whole(
        option: str, value: int | None, usual: int, rounds: Rounds | None, least: int = 0
    ) -> int:
        """Return a number of steps: as it is said, else what is usual, in whole rounds."""
        if rounds is None:
            return usual if value is None else value
        if value is None:
            return rounds.steps * math.ceil(max(usual, least) / rounds.steps)
        if value % rounds.steps:
            raise click.UsageError(
                f"{option}: want whole rounds, a multiple of --local-steps, {rounds.steps}; "
                f"got {value}"
            )
        return value


def simulation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare them all; the command is called with `asked`, which holds them."""

    @functools.wraps(function)
    def together(*arguments: object, **given: object) -> object:
        own: dict[str, Any] = {each.name: given.pop(each.name) for each in fields(Asked)}
        return function(*arguments, asked=Asked(**own), **given)

    return all_of(*_OPTIONS)(together)
