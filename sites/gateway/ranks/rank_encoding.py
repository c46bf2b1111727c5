"""Offers ranks to encode their gradients themselves, and checks what they hand over.

A body replaces the elements of its chunk, from the first one's place on, and is never larger. So
results can be written chunk by chunk over what has been read, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.protos.errors import LocalProtocolError
from isthmus.sites.codecs.codec import BodyCodec, Codec
from isthmus.sites.codecs.registry import codec_named
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.local.chunk_grid import grid
from isthmus.sites.local.rank_messages import EncodingOffer, Form, Reduce
from isthmus.topology.spec.reduction_plan import ReductionPlan, has_same_turns


class RankEncoding:
    """What this gateway offers to its ranks, and which of them take it."""

    def __init__(self, config: GatewayConfig) -> None:
        """Offer the codecs of all trees where one has bodies."""
        self._config = config
        self._codecs = tuple(map(codec_named, config.codecs))
        self._offers = len(config.sites) > 1 and any(map(_has_body, self._codecs))
        self._takers: set[int] = set()

    def take(self, rank: int) -> None:
        """A rank joins, and will encode what it is offered."""
        if self._offers:
            self._takers.add(rank)

    def problem_with(self, plan: ReductionPlan, codecs: Sequence[str]) -> str:
        """Return why later rounds cannot have another plan; nothing if they can.

        Ranks that encode were told once, when they joined, which turn has which codec.
        """
        if not self._takers or has_same_turns(
            (self._config.plan, self._config.codecs), (plan, codecs)
        ):
            return ""
        return (
            f"ranks of site {self._config.site} encode on their devices, and were told at the "
            "start which chunk has which codec: that would change"
        )

    @property
    def offer(self) -> EncodingOffer | None:
        """What a rank's welcome says; None offers nothing."""
        if not self._offers:
            return None
        config = self._config
        is_one = len(set(config.codecs)) == 1
        return EncodingOffer(
            codecs=tuple(config.codecs),
            turns=(0,) if is_one else tuple(config.plan.turns),
            chunk_numel=config.chunk_numel,
            error_feedback=config.error_feedback,
        )

    def check(self, rank: int, reduce: Reduce) -> None:
        """See that what a rank hands over has a form and a size that it may have.

        Raises:
            LocalProtocolError: it has not; names the bucket.
        """
        if reduce.form is Form.VALUES:
            return
        name = f"rank {rank}: round {reduce.round} bucket {reduce.bucket}"
        if rank not in self._takers or reduce.exact:
            raise LocalProtocolError(f"{name}: {reduce.form} values where float32 belong")
        if reduce.form is Form.UNFIT:
            return
        config = self._config
        cut = grid(reduce.numel, config.chunk_numel, reduce.sharing(config.ranks_per_site))
        chunks = cut.chunks(config.site_index, rank)
        expected = 0
        for chunk in chunks:
            codec = self._codecs[config.plan.tree_index(cut.turn(reduce.bucket, chunk))]
            numel = cut.span(chunk)[1]
            expected += codec.body_bytes(numel) if isinstance(codec, BodyCodec) else 4 * numel
        if reduce.encoded_bytes != expected:
            raise LocalProtocolError(
                f"{name}: {reduce.encoded_bytes} encoded bytes; its {len(chunks)} chunks, from "
                f"{chunks.start} on, have {expected}"
            )


def _has_body(codec: Codec) -> bool:
    return isinstance(codec, BodyCodec)
