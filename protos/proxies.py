"""The HTTP proxy between a site and the coordinator, for sites without direct access.

gRPC would use the environment's web proxy for any connection. We use a proxy only if ISTHMUS_PROXY
is set, and only for the control plane. The proxy carries TLS bytes after CONNECT, and learns only
the addresses of both ends.
"""

from __future__ import annotations

import os
import re
from typing import Final

from isthmus.protos.errors import IsthmusError
from isthmus.protos.security import InsecureAddressError, tls_files

PROXY: Final = "ISTHMUS_PROXY"
"""Environment variable of the proxy: http://HOST:PORT, or http://USER:PASSWORD@HOST:PORT."""
NO_PROXY: Final = (("grpc.enable_http_proxy", 0),)
"""Option of a channel that connects to its server directly."""
_URL = re.compile(r"http://([^\s/@]+@)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]@]+):[0-9]{1,5}/?")


class ProxyError(IsthmusError):
    """ISTHMUS_PROXY does not have the form http://HOST:PORT."""

    code = "INVALID_CONFIG"


def proxy_options() -> list[tuple[str, int | str]]:
    """Return the options of a channel to the coordinator, through the proxy if one is set.

    Raises:
        InsecureAddressError: a proxy without TLS, which would read the secret.
        ProxyError: the variable is not valid.
    """
    url = os.environ.get(PROXY, "")
    if not url:
        return list(NO_PROXY)
    if _URL.fullmatch(url) is None:
        raise ProxyError(f"${PROXY}: want http://HOST:PORT")
    if tls_files() is None:
        raise InsecureAddressError("a proxy would read what this process says without TLS")
    # If set, gRPC uses it instead of no_proxy, which is meant for the web.
    os.environ.setdefault("no_grpc_proxy", "")
    return [("grpc.http_proxy", url.rstrip("/"))]
