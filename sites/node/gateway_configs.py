"""Makes the configuration of each gateway of a site from a run's spec. Pure."""

from __future__ import annotations

import dataclasses

from isthmus.sites.gateway.config import GatewayConfig, PeerLink, StallLimits
from isthmus.topology.spec.job import Probe
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.world import Link, Topology
from isthmus.topology.trees.channels import FLOWS_MAX

_PROBE_WINDOW_MIN_BYTES = 2 << 20
_PROBE_WINDOW_MAX_BYTES = 16 << 20
"""HTTP/2 window in a probe; a connection may hold twice this unread. The kernel's own limit (6 MiB
by default) keeps one connection below it, and many together must not fill a machine's memory."""


def gateway_config(
    spec: RunSpec,
    *,
    run_id: str,
    generation: int,
    config_hash: str,
    site: str,
    gateway: int,
    bind_host: str | None = None,
    dialled_host: str | None = None,
    socket_path: str,
    state_folder: str = "",
    revoked: str = "",
) -> GatewayConfig:
    """Return the configuration of one gateway for a run.

    `bind_host` and `dialled_host` override the site's hosts in the topology.

    Raises:
        ConfigError: the run exceeds a gateway's limits.
    """
    exchange, sites = spec.job.exchange, spec.topology.sites
    described = spec.topology.site(site)
    interfaces = () if bind_host else described.interfaces
    in_node = gateway % described.gateways_per_node
    config = GatewayConfig(
        run_id=run_id,
        generation=generation,
        config_hash=config_hash,
        site=site,
        gateway=gateway,
        sites=spec.site_names,
        gateways_per_site=tuple(each.num_gateways for each in sites),
        ranks_per_gateway=tuple(each.ranks_per_gateway for each in sites),
        plan=spec.first_reduction.plan,
        codecs=spec.first_reduction.codecs,
        error_feedback=exchange.error_feedback,
        error_feedback_decay=exchange.error_feedback_decay,
        non_finite=exchange.non_finite,
        steps_per_round=spec.longest_regime.period,
        chunk_bytes=spec.chunk_bytes,
        channels_per_link=exchange.channels_per_link,
        window_bytes=exchange.window_bytes,
        pipeline_bytes=spec.pipeline_bytes,
        verify_every=spec.job.verify_every,
        bind_host="" if interfaces else bind_host or described.bind or described.dialled,
        interface=interfaces[gateway % len(interfaces)] if interfaces else "",
        dialled_host=described.address if dialled_host is None else dialled_host,
        ports=described.ports,
        listens=described.inbound,
        socket_path=socket_path,
        state_folder=state_folder,
        fetches_state=in_node == 0,
        return_share=spec.topology.failure.return_share,
        links=tuple(
            PeerLink(
                site=link.target,
                bytes_per_s=link.bytes_per_s,
                rtt_s=link.rtt_s,
                max_flows=link.max_flows or FLOWS_MAX,
                is_shared=link.share < 1,
                congestion=link.congestion or "",
                dials_in=not spec.topology.site(link.target).inbound,
            )
            for link in _links_of(spec, site)
        ),
        peer_lost_s=spec.timeouts.peer_lost_s,
        rank_wait_s=spec.timeouts.process_group_s,
        stall=StallLimits(
            least_s=spec.timeouts.stall_s,
            rounds=spec.timeouts.stall_steps,
            first_s=spec.timeouts.start_s,
        ),
        keepalive_time_s=spec.timeouts.keepalive_time_s,
        keepalive_timeout_s=spec.timeouts.keepalive_timeout_s,
        revoked=revoked,
    )
    if spec.job.probe is not None:
        return probing_config(config, spec.job.probe, spec.topology)
    return config


def probing_config(config: GatewayConfig, probe: Probe, topology: Topology) -> GatewayConfig:
    """Return a site's configuration for a probe: one gateway, all links with both directions."""
    links = [
        PeerLink(site=link.target, bytes_per_s=link.bytes_per_s, rtt_s=link.rtt_s)
        for link in topology.links
        if link.source == config.site and topology.link(link.target, link.source) is not None
    ]
    held = max((int(link.bytes_per_s * link.rtt_s) for link in links), default=0)
    return dataclasses.replace(
        config,
        links=tuple(links),
        gateways_per_site=(1,) * len(config.sites),
        window_bytes=min(max(held, _PROBE_WINDOW_MIN_BYTES), _PROBE_WINDOW_MAX_BYTES),
        probe=probe,
    )


def _links_of(spec: RunSpec, site: str) -> list[Link]:
    """Return the links to all possible neighbours: members and trees may change."""
    topology, names = spec.topology, spec.site_names
    links = [topology.link(site, other) for other in names if topology.link(other, site)]
    return [link for link in links if link is not None]
