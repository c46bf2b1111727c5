"""Which regimes can train what a script has attached, and what it may not do in them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from isthmus.protos.failure import text_of
from isthmus.sites.worker.exchange.rank_context import RankContext
from isthmus.sites.worker.layouts.replicas_beside_shards import check_agreed
from isthmus.sites.worker.regimes.look_ahead import check_known
from isthmus.topology.spec.regime import Regime


def why_only_sync(
    optimizers: Sequence[Optimizer], replicas: Sequence[DistributedDataParallel]
) -> str:
    """Return what is attached that no other regime trains; empty: any does."""
    if len(optimizers) > 1:
        return "several optimizers are attached"
    try:
        check_known(optimizers[0])
        if replicas:
            check_agreed(replicas, "delayed")
    except TypeError as error:
        return text_of(error)
    return ""


def check_open(context: RankContext) -> None:
    """Refuse rounds that wait for nobody where one rank cannot decide for the site.

    Raises:
        RuntimeError: the site has several gateways.
    """
    if 0 < context.welcome.ranks_per_gateway < context.world_size:
        raise RuntimeError(
            f"regime.min_steps: site {context.site} has several gateways, which do not hear of "
            "each other's ranks: leave min_steps out, or let the site have one gateway"
        )


def check_average_gradients(regime: Regime) -> None:
    """Refuse `site.average_gradients`, unless gradients cross in each step.

    Raises:
        RuntimeError: and what to do.
    """
    if not regime.is_sync:
        raise RuntimeError(
            f"site.average_gradients: the job's regime is {regime.kind}, which needs "
            "site.attach(model, optimizer): call that, or say `regime: sync`"
        )


def check_all_reduce(regime: Regime, *, exact: bool, is_attached: bool) -> None:
    """Refuse `site.all_reduce` of what may be gradients that the regime lets cross otherwise.

    Raises:
        RuntimeError: and what to do.
    """
    if not (exact or regime.is_sync or is_attached):
        raise RuntimeError(
            f"site.all_reduce: the job's regime is {regime.kind}, which needs "
            "site.attach(model, optimizer), and what is averaged by hand may be gradients: "
            "call that first, give all_reduce exact=True, or say `regime: sync`"
        )
    if regime.is_open and is_attached:
        raise RuntimeError(
            "site.all_reduce: with regime.min_steps sites are not in the same step, so nothing "
            "is averaged by hand: leave it out, or leave out min_steps"
        )
