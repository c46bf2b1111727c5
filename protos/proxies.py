"""The HTTP proxy between a site and the coordinator, where there is no other way out.

gRPC would take whatever proxy the environment names for the web, for any connection. Here one is
used only where isthmus is told so, and only for the control plane. It sees TLS: it carries bytes
after CONNECT, and learns no more than who speaks with whom.
"""

from __future__ import annotations

import os
import re
from typing import Final

from isthmus.protos.errors import IsthmusError
from isthmus.protos.security import InsecureAddressError, tls_files

PROXY: Final = "ISTHMUS_PROXY"
"""Names the proxy: http://HOST:PORT, or http://USER:PASSWORD@HOST:PORT."""
NO_PROXY: Final = (("grpc.enable_http_proxy", 0),)
"""The argument of a channel that goes straight to its server."""
_URL = re.compile(r"http://([^\s/@]+@)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]@]+):[0-9]{1,5}/?")


class ProxyError(IsthmusError):
    """The environment's proxy is not written as http://HOST:PORT."""

    code = "INVALID_CONFIG"


def proxy_options() -> list[tuple[str, int | str]]:
    """Return the arguments of a channel to the coordinator: through the proxy that is told, if any.

    Raises:
        InsecureAddressError: there is one, and no TLS: it would read the secret.
        ProxyError: what is told is no proxy.
    """
    url = os.environ.get(PROXY, "")
    if not url:
        return list(NO_PROXY)
    if _URL.fullmatch(url) is None:
        raise ProxyError(f"${PROXY}: want http://HOST:PORT")
    if tls_files() is None:
        raise InsecureAddressError("a proxy would read what this process says without TLS")
    # Set, it is asked for instead of no_proxy, which says what holds for the web.
    os.environ.setdefault("no_grpc_proxy", "")
    return [("grpc.http_proxy", url.rstrip("/"))]
