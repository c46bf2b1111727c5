"""Messages between ranks and gateways: each crosses as it is, and what is none is named."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from isthmus.protos.errors import LocalProtocolError, PeerLostError, RemoteProtocolError
from isthmus.protos.failure import Failure
from isthmus.protos.limits import LOCAL_MESSAGE_BYTES
from isthmus.sites.local.rank_messages import (
    FROM_GATEWAY,
    FROM_RANK,
    Digest,
    EncodingOffer,
    Failed,
    Form,
    FromGateway,
    FromRank,
    Join,
    Leave,
    Metric,
    Reduce,
    Reduced,
    ReductionTimes,
    Region,
    StateProgress,
    Welcome,
    encode,
    error_of,
)

REDUCE = Reduce(
    round=3,
    bucket=2**32 - 1,
    region=1,
    offset=5,
    numel=900,
    layout=77,
    weight=2.0**53,
    exact=False,
    form=Form.ENCODED,
    encoded_bytes=450,
)
OFFER = EncodingOffer(codecs=("int8", "topk"), turns=(0, 1, 0), chunk_numel=64, error_feedback=True)
WELCOME = Welcome(
    site="ash",
    site_index=1,
    sites=("birch", "ash"),
    ranks_per_site=(2, 1),
    verify_every=0,
    config_hash="ab",
    encoding=OFFER,
)
TIMES = ReductionTimes(inter_s=0.5, wait_s=0.25, encode_s=1.0, decode_s=2.0)
REDUCED = Reduced(round=3, bucket=1, weight=7.0, times=TIMES, wire_bytes=99)


@pytest.mark.parametrize(
    "message",
    [
        Join(rank=1, generation=2, local_rank=1, pid=99, encodes=True),
        Region(region=1 << 20, numel=0),
        REDUCE,
        Metric(kind="step", step=4, values={"loss": 2.5}, labels={"a": "b"}),
        Digest(step=4, combined=2**64 - 1, tensors=(0, 2**64 - 1), names=("w", "b")),
        StateProgress(epoch=7, done_bytes=1 << 40, problem="No space left"),
        Leave(),
    ],
)
def test_what_a_rank_says_crosses_as_it_is(message: FromRank) -> None:
    assert FROM_RANK.read(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [WELCOME, REDUCED, Failed(failure=Failure(code="PEER_LOST", message="gone", site="birch"))],
)
def test_what_a_gateway_says_crosses_as_it_is(message: FromGateway) -> None:
    assert FROM_GATEWAY.read(encode(message)) == message


def test_a_weight_that_nothing_tells_is_not_a_number() -> None:
    told = Reduced(round=0, bucket=0, weight=math.nan, times=TIMES, wire_bytes=0)
    heard = FROM_GATEWAY.read(encode(told))
    assert isinstance(heard, Reduced)
    assert math.isnan(heard.weight)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"round": -1}, "reduce.round: want 0 to"),
        ({"bucket": 1 << 32}, "reduce.bucket: want 0 to 4294967295"),
        ({"numel": 1.5}, "reduce.numel: want 0 to"),
        ({"numel": True}, "reduce.numel: want 0 to"),
        ({"weight": math.nan}, "reduce.weight: want 0 to"),
        ({"weight": 10**400}, "reduce.weight: want 0 to"),
        ({"exact": 1}, "reduce.exact: want bool"),
        ({"form": "jpeg"}, "reduce.form: want one of values, encoded, unfit"),
        ({"colour": "red"}, "reduce.colour: unknown"),
        ({"op": "dance"}, "the message: want an object with one of the ops join, region"),
        ({"op": "welcome"}, "the message: want an object with one of the ops join, region"),
    ],
)
def test_a_rank_s_mistake_is_named(changes: dict[str, Any], said: str) -> None:
    wrong = json.dumps({**json.loads(encode(REDUCE)), **changes}).encode()
    with pytest.raises(LocalProtocolError, match=f"rank to gateway: {said}"):
        FROM_RANK.read(wrong)


@pytest.mark.parametrize(
    ("message", "changes", "said"),
    [
        (WELCOME, {"sites": "ash"}, "welcome.sites: want a list"),
        (WELCOME, {"ranks_per_site": ["1"]}, "welcome.ranks_per_site.0: want 0 to"),
        (WELCOME, {"encoding": {"codecs": []}}, "welcome.encoding.turns is missing"),
        (REDUCED, {"times": {"wait_s": "long"}}, "reduced.times.wait_s: want float"),
        (REDUCED, {"op": "failed"}, "failed.round: unknown"),
    ],
)
def test_a_gateway_s_mistake_is_named(
    message: FromGateway, changes: dict[str, Any], said: str
) -> None:
    wrong = json.dumps({**json.loads(encode(message)), **changes}).encode()
    with pytest.raises(RemoteProtocolError, match=f"gateway to rank: {said}"):
        FROM_GATEWAY.read(wrong)


def test_a_message_has_a_largest_size() -> None:
    names = ("weight",) * LOCAL_MESSAGE_BYTES
    with pytest.raises(LocalProtocolError, match=r"a digest message of \d+ bytes"):
        encode(Digest(step=0, combined=0, tensors=(), names=names))


def test_a_failure_is_raised_with_the_site_that_it_names() -> None:
    error = error_of(Failure(code="PEER_LOST", message="gone", site="birch"))
    assert isinstance(error, PeerLostError)
    assert error.site == "birch"
