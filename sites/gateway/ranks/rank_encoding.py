"""Lets ranks encode their gradients themselves, and checks the encoded chunks they submit.

The encoded body replaces the elements of its chunk in place, and is never larger. So results can be
written over read chunks, in any order.
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
    """The codecs that a gateway offers to its ranks, and which ranks encode."""

    def __init__(self, config: GatewayConfig) -> None:
        """Offer the codecs of all trees if one has bodies that a rank can encode."""
        self._config = config
        self._codecs = tuple(map(codec_named, config.codecs))
        self._offers = len(config.sites) > 1 and any(map(_has_body, self._codecs))
        self._takers: set[int] = set()

    def take(self, rank: int) -> None:
        """Note that a joining rank will encode as offered."""
        if self._offers:
            self._takers.add(rank)

    def problem_with(self, plan: ReductionPlan, codecs: Sequence[str]) -> str:
        """Return why later rounds cannot use another plan; empty if they can.

        Ranks that encode learn each tree's codec only once, when they join.
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
        """The offer in a rank's welcome message. None: ranks do not encode."""
        if not self._offers:
            return None
        config = self._config
        is_one = len(set(config.codecs)) == 1
        return EncodingOffer(
            codecs=tuple(config.codecs),
            turns=(0,) if is_one else tuple(config.plan.turns),
            chunk_numel=config.chunk_numel,
            error_feedback=config.error_feedback,
            error_feedback_decay=config.error_feedback_decay,
        )

    def check(self, rank: int, reduce: Reduce) -> None:
        """Check that a submitted bucket has a form and size that are allowed.

        Raises:
            LocalProtocolError: it has not; the message names the bucket.
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
