"""What a gateway is told, and what follows of it for its channels."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.sites.gateway.config import CHUNK_BYTES_MAX, GatewayConfig
from isthmus.sites.gateway.links.transport import patience
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import read_json, to_json
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from tests.fakes.gateway_sites import gateway_config


@pytest.mark.parametrize("rtt_s", [0.0, 0.08, 0.3])
def test_a_connection_has_time_for_its_round_trips(tmp_path: Path, rtt_s: float) -> None:
    config = gateway_config(tmp_path, ReductionPlan(2, (), ""), 0)
    far = replace(config, links=tuple(replace(link, rtt_s=rtt_s) for link in config.links))
    # TCP's handshake and TLS's; and as much for queues, and a packet that is sent again.
    assert patience(far).connect_s >= 1.0 + 6 * rtt_s


def test_configuration_survives_json(tmp_path: Path) -> None:
    trees = (star(3, 1), Tree(0, {1: 0, 2: 1}, 2, {1: 2, 2: 0}))
    config = gateway_config(tmp_path, ReductionPlan(3, trees, "why"), 2)
    assert read_json(GatewayConfig, json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("down", "message"),
    [
        ({1: 2, 2: 1}, "plan.trees.0.down: site 1 never gets to the root"),
        ({1: 0}, "plan.trees.0.down: want each of 3 sites once"),
    ],
)
def test_a_way_down_that_reaches_not_every_site(
    down: dict[int, int], message: str, tmp_path: Path
) -> None:
    plan = ReductionPlan(3, (Tree(0, {1: 0, 2: 0}, down=down),), "")
    with pytest.raises(ConfigError, match=message):
        gateway_config(tmp_path, plan, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_bytes": 3}, "exchange.chunk_bytes: want 4 to"),
        ({"chunk_bytes": CHUNK_BYTES_MAX + 1}, "exchange.chunk_bytes: want 4 to"),
        ({"channels_per_link": 0}, "exchange.channels_per_link: want 1 or more, got 0"),
        ({"site": "elm"}, "site: 'elm' is not one of ash, birch"),
        ({"gateway": 1}, "gateway: site ash has no gateway 1"),
    ],
)
def test_configuration_that_cannot_be(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = gateway_config(tmp_path, ReductionPlan(2, (), ""), 0)
    with pytest.raises(ConfigError, match=message):
        replace(config, **changes)
