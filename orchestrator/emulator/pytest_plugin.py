"""The `wan` fixture: put an emulated WAN between the parts of any test.

```python
def test_my_protocol(wan):
    links = [LinkShape(source="eu", target="us", bytes_per_s=12.5e6, delay_s=0.04),
             LinkShape(source="us", target="eu", bytes_per_s=12.5e6, delay_s=0.04)]
    gateway = RelayEndpoint(source="eu", target="us", node=0, host="127.0.0.1", port=server.port)
    [dial] = wan(links, [gateway])
    connect(dial.host, dial.port)
```

This module is loaded in every pytest session, so it imports nothing of ours before it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from orchestrator.emulator.config import RelayEndpoint
    from orchestrator.emulator.link import LinkShape
    from topology.world import Topology

    Wan = Callable[["Topology | Iterable[LinkShape]", Iterable[RelayEndpoint]], "Addresses"]
    Addresses = tuple[RelayEndpoint, ...]


@pytest.fixture
def wan() -> Iterator[Wan]:
    """Return a function that starts a relay, a process that ends with the test.

    It takes a topology or directed links, and where each gateway listens; it returns, in the same
    order, where to dial instead. It may be called more than once.
    """
    from orchestrator.emulator.child import running_relay
    from orchestrator.emulator.config import RelayConfig, shapes_of
    from topology.world import Topology

    with contextlib.ExitStack() as relays:

        def start(
            links: Topology | Iterable[LinkShape], endpoints: Iterable[RelayEndpoint]
        ) -> Addresses:
            shapes = shapes_of(links) if isinstance(links, Topology) else tuple(links)
            config = RelayConfig(links=shapes, endpoints=tuple(endpoints))
            return relays.enter_context(running_relay(config)).endpoints

        yield start
