"""What a regime is expected to cost in loss, as a share of that of `sync`. Pure.

These are priors, from other people's models: your own model's gap is known once it has been trained
both ways.

From: Scaling Laws for DiLoCo (arXiv 2503.09799, tables 4 and 5: H = 30, rates and batches tuned for
each cell), Streaming DiLoCo (2501.18512, table 5: H = 30 and 100 at two sites), DiLoCo (2311.08105:
H up to 1,000 at 150 M parameters). `delayed` is not published: docs/measurements/regimes.md.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from isthmus.topology.spec.regime import SYNC_EVERY, Regime

SMALL = 35e6
"""Parameters of the smallest model that was tried: a model whose size is unknown may be that."""
_PARAMETERS = (SMALL, 90e6, 335e6, 1.3e9, 2.4e9)
_SITES = (2, 4, 8)
_GAPS = (
    (0.007, 0.020, 0.039),
    (0.005, 0.015, 0.031),
    (0.001, 0.009, 0.020),
    (0.002, 0.005, 0.013),
    (0.0, 0.003, 0.011),
)
"""By parameters and sites, at SYNC_EVERY steps a round; what is below 0 is 0."""
_TENFOLD = 0.013
"""What rounds of ten times as many steps cost beside it: 0.007 from 30 to 100."""
_DELAYED, _STALE = 0.011, 0.12
"""Gaps of `delayed`, and of it without looking ahead. Each is the larger one of two learning rates,
at half a million parameters. Larger models were not tried."""


def loss_gap(regime: Regime, parameters: float, sites: int) -> float:
    """Return how much more loss a regime is expected to end with than `sync`, as a share of it.

    Args:
        regime: Not `sync`, of which it is 0.
        parameters: Of the model.
        sites: How many take part, 2 or more.
    """
    if regime.is_sync:
        return 0.0
    if not regime.is_local:
        return _DELAYED if regime.look else _STALE
    columns = [_between(sites, _SITES, row) for row in _GAPS]
    longer = max(0.0, math.log10(regime.sync_every / SYNC_EVERY))
    return _between(parameters, _PARAMETERS, columns) + _TENFOLD * longer


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate over the logarithm, and beyond the ends; never below the least value."""
    index = min(max(bisect.bisect_left(places, at), 1), len(places) - 1)
    low, high = places[index - 1 : index + 1]
    share = math.log(at / low) / math.log(high / low)
    found = values[index - 1] + (values[index] - values[index - 1]) * share
    return max(found, min(values))
