"""The identities in certificates, and the calls that each role may make.

An identity is a SPIFFE URI: `spiffe://DOMAIN/coordinator`, `/operator`, `/site/NAME/agent`,
`/site/NAME/gateway` or, in a join token, `/site/NAME/joiner`. Servers read the URI. A client checks
a server's identity as a DNS name, with the same words in reverse (`gateway.NAME.site.DOMAIN`),
because TLS libraries compare nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

COORDINATOR: Final = "coordinator"
OPERATOR: Final = "operator"
AGENT: Final = "agent"
GATEWAY: Final = "gateway"
JOINER: Final = "joiner"
"""Role of a holder of a site's join token."""

WARN_DAYS: Final = 14
"""People are told of a certificate that ends within so many days."""

_DOMAIN: Final = r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?"
_SITE: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}"
_URI = re.compile(
    rf"spiffe://({_DOMAIN})(?:/(coordinator|operator)|/site/({_SITE})/(agent|gateway|joiner))"
)
_NAME = re.compile(rf"(coordinator|operator)|({_SITE})\.(agent|gateway|joiner)")

_CONTROL = "/isthmus.control.v1.Coordinator/"
_EXCHANGE = "/isthmus.exchange.v1.Exchange/"
_STATE = "/isthmus.exchange.v1.State/"
_PROBE = "/isthmus.exchange.v1.Probe/"
CALLERS: Mapping[str, str] = {
    f"{_CONTROL}Session": AGENT,
    f"{_CONTROL}ShipLogs": AGENT,
    f"{_CONTROL}GetBlobs": AGENT,
    f"{_CONTROL}MissingBlobs": OPERATOR,
    f"{_CONTROL}PutBlobs": OPERATOR,
    f"{_CONTROL}Submit": OPERATOR,
    f"{_CONTROL}GetRun": OPERATOR,
    f"{_CONTROL}ListRuns": OPERATOR,
    f"{_CONTROL}WatchRun": OPERATOR,
    f"{_CONTROL}ReadLogs": OPERATOR,
    f"{_CONTROL}ReadEvents": OPERATOR,
    f"{_CONTROL}CancelRun": OPERATOR,
    f"{_CONTROL}DropSite": OPERATOR,
    f"{_CONTROL}AddSite": OPERATOR,
    f"{_CONTROL}OfferJoin": OPERATOR,
    f"{_CONTROL}Join": JOINER,
    f"{_EXCHANGE}Hello": GATEWAY,
    f"{_EXCHANGE}Leave": GATEWAY,
    f"{_EXCHANGE}Push": GATEWAY,
    f"{_EXCHANGE}Reverse": GATEWAY,
    f"{_STATE}Index": GATEWAY,
    f"{_STATE}Read": GATEWAY,
    f"{_PROBE}Turn": GATEWAY,
    f"{_PROBE}Echo": GATEWAY,
    f"{_PROBE}Finish": GATEWAY,
    f"{_PROBE}Flood": GATEWAY,
}
"""The one role that may make a call; unlisted calls are refused, with TLS or without."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A role in a deployment; agents and gateways belong to a site."""

    domain: str
    role: str
    site: str = ""

    @classmethod
    def of_uri(cls, uri: str) -> Self | None:
        """Return the identity in a URI; None if the URI is not ours."""
        found = _URI.fullmatch(uri)
        if found is None:
            return None
        domain, alone, site, role = found.groups()
        return cls(domain, alone or role, site or "")

    @classmethod
    def of_name(cls, domain: str, name: str) -> Self | None:
        """Return the identity with this `file_name`; None: there is none."""
        found = _NAME.fullmatch(name)
        if found is None or re.fullmatch(_DOMAIN, domain) is None:
            return None
        alone, site, role = found.groups()
        return cls(domain, alone or role, site or "")

    @property
    def uri(self) -> str:
        """The SPIFFE URI for certificates."""
        place = f"site/{self.site}/" if self.site else ""
        return f"spiffe://{self.domain}/{place}{self.role}"

    @property
    def dns_name(self) -> str:
        """The name by which clients know a server of this identity."""
        place = f".{self.site}.site" if self.site else ""
        return f"{self.role}{place}.{self.domain}"

    @property
    def file_name(self) -> str:
        """Base name of the identity's files: `coordinator`, `eu.agent`."""
        return f"{self.site}.{self.role}" if self.site else self.role

    def __str__(self) -> str:
        return f"the {self.role} of site {self.site}" if self.site else f"the {self.role}"
