"""Identities are read strictly, and every call of both planes is for exactly one role."""

import pytest

from isthmus.protos.identities import CALLERS, Identity
from tests.fakes.methods import FRAME_METHODS, described_methods


def test_every_call_of_both_planes_has_a_role_and_every_role_a_call() -> None:
    methods = described_methods()
    services = {each.rpartition("/")[0].rpartition(".")[2] for each in methods}
    assert services == {"Coordinator", "Exchange", "State", "Probe"}, "all files were found"
    assert methods.isdisjoint(FRAME_METHODS)
    assert set(CALLERS) == methods | FRAME_METHODS


@pytest.mark.parametrize(
    ("name", "uri", "dns_name"),
    [
        ("coordinator", "spiffe://x.org/coordinator", "coordinator.x.org"),
        ("operator", "spiffe://x.org/operator", "operator.x.org"),
        ("eu.agent", "spiffe://x.org/site/eu/agent", "agent.eu.site.x.org"),
        ("eu.west.gateway", "spiffe://x.org/site/eu.west/gateway", "gateway.eu.west.site.x.org"),
    ],
)
def test_an_identity_has_three_spellings(name: str, uri: str, dns_name: str) -> None:
    identity = Identity.of_uri(uri)
    assert identity is not None
    assert identity == Identity.of_name("x.org", name)
    assert (identity.uri, identity.dns_name, identity.file_name) == (uri, dns_name, name)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://x.org/coordinator",
        "spiffe://x.org",
        "spiffe://x.org/coordinator/",
        "spiffe://x.org/coordinator\n",
        "spiffe://x.org/Operator",
        "spiffe://x.org/site//agent",
        "spiffe://x.org/site/../agent",
        "spiffe://x.org/site/a/b/agent",
        "spiffe://x.org/site/a/root",
        "spiffe://x.org/site/a/agent?x",
        "spiffe:///coordinator",
    ],
)
def test_nothing_else_is_an_identity(uri: str) -> None:
    assert Identity.of_uri(uri) is None


@pytest.mark.parametrize("name", ["ca", "../x.agent", "a", ".agent", "a.root", "a/b.agent", ""])
def test_nothing_else_is_a_name(name: str) -> None:
    assert Identity.of_name("x.org", name) is None
