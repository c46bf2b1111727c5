"""Every method that is served, by what is generated from the .proto files below protos/."""

from __future__ import annotations

import importlib
import pkgutil

from isthmus import protos
from isthmus.sites.gateway.links.transport import PUSH_METHOD, REVERSE_METHOD
from isthmus.sites.gateway.probing.probe_server import FLOOD_METHOD

FRAME_METHODS = frozenset({PUSH_METHOD, REVERSE_METHOD, FLOOD_METHOD})
"""They carry bytes, and stand in no .proto file."""


def described_methods() -> set[str]:
    """Return the methods of every service of every .proto file."""
    found = set()
    for module in pkgutil.walk_packages(protos.__path__, f"{protos.__name__}."):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(module.name).DESCRIPTOR
            found |= {
                f"/{service.full_name}/{method.name}"
                for service in file.services_by_name.values()
                for method in service.methods
            }
    return found
