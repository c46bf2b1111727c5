"""Reductions of a bucket over a wire that reorders and repeats, and the sums they must come to."""

import itertools
import random
import time
from collections.abc import Iterator

import numpy as np

from isthmus.protos.frame import pack, unpack
from isthmus.sites.codecs.codec import Codec, Floats
from isthmus.sites.gateway.reduction.chunk_reduction import (
    Action,
    Bucket,
    BucketReduction,
    Event,
    Finish,
    Own,
    Received,
    Send,
    roles,
)
from isthmus.sites.gateway.reduction.residuals import Residuals
from isthmus.sites.local.chunk_grid import Grid, grid
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree

RANKS = (2, 3, 1, 5, 4)
BUCKET = 2


def contribution(seed: int, site: int, numel: int, weight: float) -> Floats:
    generator = np.random.default_rng((seed, site))
    values = generator.standard_normal(numel) * np.exp(generator.normal(0, 3, numel)) * weight
    return values.astype(np.float32)


def every_tree(plan: ReductionPlan, codec: Codec) -> tuple[Codec, ...]:
    return (codec,) * max(1, len(plan.trees))


class Reference:
    """Sums by the definition, chunk by chunk and recursively; keeps encoders' residuals."""

    def __init__(
        self, plan: ReductionPlan, codec: Codec | tuple[Codec, ...], feedback: bool
    ) -> None:
        self.plan, self.feedback = plan, feedback
        self.codecs = codec if isinstance(codec, tuple) else every_tree(plan, codec)
        self.codec = self.codecs[0]
        """Of the chunk that is being reduced."""
        self.residual: dict[tuple[int, int], Floats] = {}
        """By site and chunk."""

    def reduce(self, cut: Grid, parts: list[Floats], weights: list[float]) -> Floats:
        result = np.empty(cut.numel, dtype=np.float32)
        divisor = np.float32(sum(weights))
        for chunk in range(cut.num_chunks):
            start, count = cut.span(chunk)
            own = [part[start : start + count] for part in parts]
            if self.plan.num_sites == 1:
                result[start : start + count] = own[0] / divisor
            elif self.plan.is_gather:
                total = self.sent(0, chunk, own[0])
                for site, values in enumerate(own[1:], 1):
                    total = total + self.sent(site, chunk, values)
                result[start : start + count] = total / divisor
            else:
                # The trees go on taking turns where the bucket before, as long as this one, has
                # ended.
                turn = BUCKET * cut.num_chunks + chunk
                tree = self.plan.trees[self.plan.tree_index(turn)]
                self.codec = self.codecs[self.plan.tree_index(turn)]
                total = self.subtree(tree, tree.root, chunk, own) / divisor
                result[start : start + count] = self.sent(tree.root, chunk, total)
        return result

    def sent(self, site: int, chunk: int, values: Floats) -> Floats:
        """Return what all decode of what a site means."""
        if self.codec.lossless:
            return values
        if not self.feedback:
            return self.codec.quantize(values)
        meant = self.residual.get((site, chunk), np.zeros_like(values)) + values
        decoded = self.codec.quantize(meant)
        self.residual[site, chunk] = meant - decoded
        return decoded

    def subtree(self, tree: Tree, site: int, chunk: int, own: list[Floats]) -> Floats:
        """Return what `site` forms: its own part and its children's sums, in ascending order."""
        total: Floats | None = None
        for member in sorted((*tree.children(site), site)):
            value = own[site]
            if member != site:
                value = self.sent(member, chunk, self.subtree(tree, member, chunk, own))
            total = value if total is None else total + value
        assert total is not None
        return total


class World:
    """All sites' machines of one bucket, and a wire that reorders and repeats."""

    def __init__(
        self,
        plan: ReductionPlan,
        codec: Codec,
        numel: int,
        chunk_numel: int,
        residuals: list[Residuals] | None = None,
        ranks: tuple[int, ...] = RANKS,
    ) -> None:
        self.plan = plan
        self.cut = grid(numel, chunk_numel, ranks[: plan.num_sites])
        codecs = every_tree(plan, codec)
        self.bucket = Bucket(3, 7, BUCKET, 99, codecs, self.cut, time.thread_time)
        self.sites = [
            BucketReduction(
                self.bucket,
                plan,
                roles(plan, site),
                None if residuals is None else residuals[site].bucket(BUCKET, 99, numel),
            )
            for site in range(plan.num_sites)
        ]
        self.finished: dict[tuple[int, int], float] = {}

    def handle(self, site: int, chunk: int, event: Event) -> Iterator[Action]:
        if isinstance(event, Received):
            self.sites[site].check(event.sender, event.frame)
        for action in self.sites[site].chunk(chunk).handle(event):
            if isinstance(action, Finish):
                assert (site, chunk) not in self.finished
                self.finished[site, chunk] = action.weight
            yield action

    def run(self, parts: list[Floats], weights: list[float], order: random.Random) -> None:
        """Deliver everything once or twice, in any order that the machines' outputs allow."""
        pending: list[tuple[int, int, Event]] = []
        for site, chunk in itertools.product(
            range(self.plan.num_sites), range(self.cut.num_chunks)
        ):
            start, count = self.cut.span(chunk)
            own = Own(parts[site][start : start + count], weights[site])
            pending += [(site, chunk, own)] * order.choice((1, 1, 2))
        while pending:
            site, chunk, event = pending.pop(order.randrange(len(pending)))
            for action in self.handle(site, chunk, event):
                if isinstance(action, Send):
                    frame = unpack(pack(action.frame))
                    copies = order.choice((1, 1, 2, 3))
                    pending += [(action.site, chunk, Received(site, frame))] * copies


def check_rounds(
    plan: ReductionPlan,
    codec: Codec,
    shape: tuple[int, int, tuple[int, ...]],
    weights: list[list[float]],
    seed: int,
    feedback: bool,
) -> None:
    """Reduce a bucket in several rounds; all sites must equal the reference in each, bit by bit."""
    numel, chunk_numel, ranks = shape
    reference = Reference(plan, codec, feedback)
    residuals = [Residuals() for _ in range(plan.num_sites)] if feedback else None
    for round_, own_weights in enumerate(weights):
        parts = [
            contribution(seed + round_, site, numel, weight)
            for site, weight in enumerate(own_weights)
        ]
        world = World(plan, codec, numel, chunk_numel, residuals, ranks)
        with np.errstate(all="ignore"):
            expected = reference.reduce(world.cut, [part.copy() for part in parts], own_weights)
        world.run(parts, own_weights, random.Random(seed))
        assert len(world.finished) == plan.num_sites * world.cut.num_chunks
        assert set(world.finished.values()) <= {sum(own_weights)}
        for part in parts:
            assert part.tobytes() == expected.tobytes(), f"{seed=} {round_=}"
