"""The `wan` fixture: put an emulated WAN between the parts of any test.

```python
def test_my_protocol(wan):
    links = [LinkShape(source="eu", target="us", bytes_per_s=12.5e6, delay_s=0.04),
             LinkShape(source="us", target="eu", bytes_per_s=12.5e6, delay_s=0.04)]
    gateway = RelayEndpoint(source="eu", target="us", gateway=0, host="127.0.0.1", port=server.port)
    [dial] = wan(links, [gateway])
    connect(dial.host, dial.port)
    wan.apply([Change(kind="cut", source="eu", target="us")])
```

This module is loaded in every pytest session, so it imports our other modules lazily.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from isthmus.orchestrator.emulator.wan_fixture import Wan


@pytest.fixture
def wan() -> Iterator[Wan]:
    """Return an emulated WAN (wan_fixture.py), whose processes end with the test."""
    from isthmus.orchestrator.emulator.wan_fixture import Wan

    with Wan() as made:
        yield made
