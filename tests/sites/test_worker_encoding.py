"""Ranks that encode: the bytes of gateways, the same results, and nothing else is taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.protos.frame import Kind
from isthmus.sites.codecs.codec import Floats, Payload
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.ranks.rank_encoding import RankEncoding
from isthmus.sites.gateway.reduction.residuals import BucketResiduals
from isthmus.sites.local.chunk_grid import grid
from isthmus.sites.local.rank_messages import EncodingOffer, Form
from isthmus.sites.worker.exchange.device_codecs import DEVICE_CODECS
from isthmus.sites.worker.exchange.shard_encoder import ShardEncoder, encodes_here
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from tests.fakes.exchanges import Exchanges, request_of
from tests.fakes.gateway_rank import GatewayRank
from tests.fakes.gateway_sites import Member, gateway_config, gateways
from tests.fakes.tree_worlds import make_plan
from tests.fakes.two_sites import bits_of, run_with_gateways
from tests.sites import worker_programs
from tests.sites.encoding_programs import train_encoding
from tests.sites.test_device_codecs import EACH, body_codec

CPU = torch.device("cpu")
TREES = {
    form: make_plan(form, 3, seed=3) for form in ("gather", "star", "ring", "hierarchy", "given")
}
MIXED = ("int8", "split", "bf16", "int4-zstd", "topk")
"""Codecs of trees: some of them have no bodies."""


def make_encoder(
    name: str,
    ranks: tuple[int, ...],
    site: int,
    rank: int,
    *,
    feedback: bool = True,
    decay: float = 1.0,
) -> ShardEncoder:
    offer = EncodingOffer(
        codecs=(name,),
        turns=(0,),
        chunk_numel=256,
        error_feedback=feedback,
        error_feedback_decay=decay,
    )
    return ShardEncoder(offer, site_index=site, rank=rank, ranks_per_site=ranks, device=CPU)


def encode(encoder: ShardEncoder, region: Floats, numel: int, layout: int = 1) -> Form:
    """Do what a transfer does on the host."""
    shard = torch.from_numpy(region)
    encoded = encoder.encode(shard, bucket=0, numel=numel, layout=layout)
    if not bool(encoded.is_fit):
        return Form.UNFIT
    encoded.write(shard)
    return Form.ENCODED


def chunk_payloads(name: str, form: Form, region: Floats, numel: int) -> list[Payload]:
    """Return what the gateway of a single rank's site makes of what was handed over."""
    codec, cut = body_codec(name), grid(numel, 256, (1, 3))
    found = []
    for chunk in range(cut.num_chunks):
        start, count = cut.span(chunk)
        part = region[start : start + count]
        body = part.view(np.uint8)[: codec.body_bytes(count)].data
        found.append(codec.encode(part) if form is Form.UNFIT else codec.seal(body, count).payload)
    return found


@EACH
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_what_is_lost_is_the_residual_that_a_gateway_has(name: str, decay: float) -> None:
    """Ten rounds: one has a NaN, one numbers that bfloat16 rounds to infinity, one a new layout."""
    chance, numel, codec = np.random.default_rng(7), 1111, body_codec(name)
    encoder = make_encoder(name, (1, 3), 0, 0, decay=decay)
    cut, residuals = grid(numel, 256, (1, 3)), BucketResiduals(1, numel, decay)
    for round_ in range(10):
        values = (chance.standard_normal(numel) * 10.0 ** chance.integers(-9, 9)).astype(np.float32)
        if round_ == 3:
            values[700] = np.nan
        if round_ == 5:
            values[5] = 3.4e38
        layout = 1 if round_ < 8 else 2
        if round_ == 8:
            residuals = BucketResiduals(2, numel, decay)
        region = values.copy()
        form = encode(encoder, region, numel, layout)
        found = chunk_payloads(name, form, region, numel)
        wanted = []
        for chunk in range(cut.num_chunks):
            start, count = cut.span(chunk)
            part = values[start : start + count]
            wanted.append(residuals.encode(chunk, Kind.CONTRIBUTION, codec, part).payload)
        assert found == wanted, (name, round_)
        assert form is (
            Form.UNFIT if round_ == 3 or (round_ == 5 and name != "bf16") else Form.ENCODED
        )


def test_without_feedback_nothing_is_owed() -> None:
    values = np.full(300, 0.1, dtype=np.float32)
    values[0] = 7
    encoder = make_encoder("int4", (1, 3), 0, 0, feedback=False)
    for _ in range(20):
        region = values.copy()
        payloads = chunk_payloads("int4", encode(encoder, region, 300), region, 300)
        assert payloads[0] == BY_NAME["int4"].encode(values[:100])


def encoders_of(config: GatewayConfig) -> dict[tuple[int, int], ShardEncoder]:
    """Return each rank's encoder, by site and rank."""
    offer = RankEncoding(config).offer
    assert offer is not None
    return {
        (site, rank): ShardEncoder(
            offer, site_index=site, rank=rank, ranks_per_site=config.ranks_per_site, device=CPU
        )
        for site, ranks in enumerate(config.ranks_per_site)
        for rank in range(ranks)
    }


@pytest.mark.parametrize("form", TREES)
@pytest.mark.parametrize("name", ["bf16", "int8-zstd", "int4", "fp8", "mixed"])
def test_sites_get_the_same_bits_from_ranks_that_encode(name: str, form: str) -> None:
    """In a gather, those that they get from gateways that encode.

    One rank of a site has a NaN once.
    """
    ranks, numel = (2, 1, 3), 2000
    plan, chance = TREES[form], np.random.default_rng(3)
    names = MIXED if name == "mixed" else (name,)
    codecs = tuple(itertools.islice(itertools.cycle(names), max(1, len(plan.trees))))
    theirs, own = (Exchanges(plan, codecs, ranks, chunk_bytes=1024) for _ in range(2))
    encoders = encoders_of(own.exchanges[0]._config)
    for round_ in range(4):
        parts = [chance.standard_normal(numel).astype(np.float32) for _ in range(3)]
        if round_ == 1:
            parts[2][1500] = np.nan
        exact = round_ == 2
        own_parts = [part.copy() for part in parts]
        for site, part in enumerate(parts):
            theirs.post_site(site, part, 1.0 + site, round=round_, exact=exact)
        _post_encoded(own, {} if exact else encoders, ranks, own_parts, round_)
        for exchanges in (theirs, own):
            _deliver_all(exchanges)
            assert not exchanges.failures
        assert own_parts[0].tobytes() == own_parts[1].tobytes() == own_parts[2].tobytes()
        assert np.isnan(own_parts[0]).sum() == (round_ == 1)
        if form == "gather" or exact:
            assert own_parts[0].tobytes() == parts[0].tobytes(), round_
        else:
            # An inner site's own part is rounded as well: a step more, of at most a seventh of 5.
            np.testing.assert_allclose(own_parts[0], parts[0], atol=2.0)
    if form == "gather":
        assert _residual_chunks(own) == 0 < _residual_chunks(theirs)


def _post_encoded(
    exchanges: Exchanges,
    encoders: dict[tuple[int, int], ShardEncoder],
    ranks: tuple[int, ...],
    parts: list[Floats],
    round_: int,
) -> None:
    for site, part in enumerate(parts):
        size = -(-len(part) // ranks[site])
        for rank in range(ranks[site]):
            values = part[rank * size : (rank + 1) * size]
            encoder = encoders.get((site, rank))
            form = Form.VALUES if encoder is None else encode(encoder, values, len(part))
            request = request_of(
                len(part), round=round_, weight=1.0 + site, exact=encoder is None, form=form
            )
            exchanges.post(site, rank, request, values)


def _deliver_all(exchanges: Exchanges) -> None:
    while exchanges.wire:
        sent = exchanges.wire.pop(0)
        exchanges.deliver(sent.source, sent.target, sent.data)


def _residual_chunks(exchanges: Exchanges) -> int:
    """Return how many chunks' residuals have memory."""
    return sum(
        len(bucket._lost)
        for exchange in exchanges.exchanges
        for bucket in exchange._reductions._residuals._buckets.values()
    )


def test_what_a_gateway_offers(tmp_path: Path) -> None:
    gather = ReductionPlan(2, (), "")
    trees = TREES["given"]
    mixed = ("int8", *["int4"] * (len(trees.trees) - 1))
    assert len(trees.trees) > 1

    def offered(plan: ReductionPlan, **changes: Any) -> str | None:  # noqa: ANN401
        found = RankEncoding(gateway_config(tmp_path, plan, 0, **changes)).offer
        return None if found is None else "+".join(found.codecs)

    for name in BY_NAME:
        assert offered(gather, codec=name) == (name if name in DEVICE_CODECS else None)
    assert offered(ReductionPlan(1, (), ""), codec="int8") is None
    assert offered(trees, codec="topk") is None
    assert offered(trees, codecs=mixed) == "+".join(mixed)


def test_ranks_that_encode_keep_the_codec_of_each_turn(tmp_path: Path) -> None:
    stars = [star(2, hub) for hub in (0, 1)]
    heavy = ReductionPlan(2, (replace(stars[0], weight=2), replace(stars[1], weight=2)), "")
    uneven = ReductionPlan(2, (stars[0], replace(stars[1], weight=2)), "")
    present = ReductionPlan(2, tuple(stars), "")
    encoding = RankEncoding(gateway_config(tmp_path, present, 0, codecs=("int8", "int4")))
    assert not encoding.problem_with(present, ("int4", "int8")), "nobody encodes"
    encoding.take(0)
    assert not encoding.problem_with(heavy, ("int8", "int4"))
    for plan, codecs in (
        (present, ("int4", "int8")),
        (uneven, ("int8", "int4")),
        (ReductionPlan(2, (), ""), ("int8",)),
    ):
        assert "encode on their devices" in encoding.problem_with(plan, codecs)
    one = RankEncoding(gateway_config(tmp_path, present, 0, codec="int8"))
    one.take(0)
    assert not one.problem_with(uneven, ("int8", "int8"))
    without_offer = RankEncoding(gateway_config(tmp_path, present, 0, codecs=("fp32", "topk")))
    without_offer.take(0)
    assert not without_offer.problem_with(uneven, ("int8", "int4")), "what they send is float32"


def test_where_a_rank_encodes() -> None:
    cuda = torch.device("cuda", 0)
    for value, wanted in {"rank": [1, 1], "gateway": [0, 0], "auto": [0, 1], "": None}.items():
        environ = {"ISTHMUS_ENCODE": value}
        if wanted is None:
            with pytest.raises(
                ConfigError, match="ISTHMUS_ENCODE: want rank, gateway or auto, got"
            ):
                encodes_here(environ, CPU)
        else:
            assert [encodes_here(environ, device) for device in (CPU, cuda)] == wanted
    assert [encodes_here({}, device) for device in (CPU, cuda)] == [False, True]


@contextmanager
def one_rank(folder: Path, codec: str) -> Iterator[tuple[Member, GatewayRank]]:
    """Start two sites, of which the first has a rank that has shared a region."""
    plan = ReductionPlan(2, (), "")
    configs = [gateway_config(folder, plan, site, codec=codec) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        for member in members:
            member.wait("connected")
        path = members[0].config.socket_path
        rank = stack.enter_context(GatewayRank(path, 0, encodes=True))
        assert rank.receive()["op"] == "welcome"
        rank.share(0, 3000)
        yield members[0], rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "changes", "wanted"),
    [
        ("int8", {"form": "encoded", "encoded_bytes": 3}, "rank 0: round 0 bucket 0: 3 encoded bytes"),
        ("int8", {"form": "encoded", "encoded_bytes": 3048, "exact": True}, "bucket 0: encoded values"),
        ("topk", {"form": "encoded", "encoded_bytes": 3048}, "bucket 0: encoded values where float32"),
        ("fp32", {"form": "unfit"}, "bucket 0: unfit values where float32"),
        ("int8", {"form": "encoded", "encoded_bytes": 3048}, "bucket 0 chunk 2: a scale that int8 never has"),
    ],
)  # fmt: skip
def test_what_a_rank_may_not_hand_over(
    tmp_path: Path, codec: str, changes: dict[str, object], wanted: str
) -> None:
    with one_rank(tmp_path, codec) as (member, rank):
        region = rank.regions[0].view(np.uint8)
        region[:] = 0
        region[4 * 2048 : 4 * 2048 + 2] = (0x80, 0x7F)  # the third chunk's first scale is infinite
        rank.reduce(0, 0, 3000, 1.0, **changes)
        failed = member.wait("failed")
    assert failed["code"] == "INTERNAL"
    assert wanted in failed["message"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_that_encode_train_as_gateways_do(tmp_path: Path) -> None:
    """Real ranks and gateways of unequal sites, under a gather.

    The same bits with the same codec.
    """
    ranks, saved = (2, 1), []
    for program in (worker_programs.train, train_encoding):
        folder = tmp_path / program.__name__
        found, _ = run_with_gateways(folder, "int4", program, ranks)
        encoded = [int(path.read_text()) for path in folder.glob("*.encoded")]
        assert len(encoded) == (0 if program is worker_programs.train else 3)
        assert all(count >= worker_programs.NUM_STEPS for count in encoded)
        saved += [bits_of(each["final"]) for each in found.values()]
    assert len(saved) == 6
    assert all(each == saved[0] for each in saved)
