"""The gradient noise scale, from what sites measure of their own gradients. Pure.

B_simple = tr(S) / |G|², in tokens, with the true gradient G and the covariance S of one token's
(McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, section 2.2).
About this many tokens a step are worth it: with far fewer a batch twice as large takes half as many
steps, with far more it takes as many steps as before.

A gradient that is the mean over B tokens has an expected square norm of |G|² + tr(S) / B. Here
there are two kinds (appendix A.1 there): each site's own, over its B_s tokens, and the mean of all,
over the sum B of these. With the means over sites of |G_s|² and of 1 / B_s,

    tr(S) = (mean |G_s|² - |G_mean|²) / (mean 1/B_s - 1/B)      |G|² = |G_mean|² - tr(S) / B

Both are smoothed, each by itself, for the estimate of one step is hardly better than none. Tokens
of one sequence are not independent. So the covariance is that of sequences, counted in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from isthmus.protos import metrics

SMOOTHING: Final = 0.98
"""What remains of an average with each step: about the last 50 steps count."""
LEAST_STEPS: Final = 20
"""Before so many steps there is no figure."""
_OPEN_STEPS: Final = 256
"""Steps for which some site's record may be missing."""


@dataclass(frozen=True, slots=True)
class _Measured:
    tokens: float
    own_squares: float
    mean_squares: float


class NoiseScale:
    """Estimates the noise scale of one run, step by step."""

    def __init__(self) -> None:
        self._open: dict[int, dict[str, _Measured]] = {}
        self._covariance = 0.0
        self._signal = 0.0
        self._num_steps = 0
        self._latest = -1

    @property
    def tokens(self) -> float | None:
        """The noise scale; None: not known, or noise hides the gradient."""
        if self._num_steps < LEAST_STEPS or self._signal <= 0 or self._covariance <= 0:
            return None
        return self._covariance / self._signal

    def add(
        self, site: str, step: int, values: Mapping[str, float], members: frozenset[str]
    ) -> None:
        """Take a site's record of a step; `members` are the sites that count in it."""
        names = (
            metrics.SITE_TOKENS,
            metrics.SITE_GRADIENT_NORM,
            metrics.MEAN_GRADIENT_NORM,
        )
        tokens, own, mean = (values.get(name, 0.0) for name in names)
        if site not in members or step <= self._latest or not (tokens > 0 and own > 0 and mean > 0):
            return
        if not math.isfinite(tokens + own * own + mean * mean):
            return
        measured = self._open.setdefault(step, {})
        measured[site] = _Measured(tokens, own * own, mean * mean)
        if measured.keys() >= members:
            self._take(step, [*measured.values()])
        elif len(self._open) > _OPEN_STEPS:
            del self._open[min(self._open)]

    def _take(self, step: int, sites: list[_Measured]) -> None:
        """Take a step of which all is known; what earlier ones lack never comes."""
        self._latest = step
        self._open = {each: found for each, found in self._open.items() if each > step}
        total = sum(each.tokens for each in sites)
        spread = sum(1 / each.tokens for each in sites) / len(sites) - 1 / total
        if len(sites) < 2:
            return
        own_squares = sum(each.own_squares for each in sites) / len(sites)
        covariance = (own_squares - sites[0].mean_squares) / spread
        signal = sites[0].mean_squares - covariance / total
        self._num_steps += 1
        # As a mean at first: what came first would count longest.
        share = max(1 - SMOOTHING, 1 / self._num_steps)
        self._covariance += share * (covariance - self._covariance)
        self._signal += share * (signal - self._signal)
