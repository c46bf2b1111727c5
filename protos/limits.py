"""How large each kind of message may be. gRPC's own limits are set from these, never to -1."""

from isthmus.protos.frame import MAX_FRAME_BYTES

CONTROL_MESSAGE_BYTES = 64 << 10
"""Session, status, events: everything small and frequent."""
DOCUMENT_BYTES = 1 << 20
"""One YAML file."""
RUN_SPEC_BYTES = 8 << 20
"""A run's spec, which spells out each link: a mesh of 32 sites has half a MiB."""
PASSED_ENV_BYTES = 16 << 10
"""Characters of the variables that a job passes on to its ranks, all together."""
CONTROL_CHANNEL_BYTES = 3 * DOCUMENT_BYTES + RUN_SPEC_BYTES
"""The control channel's limit: Prepare carries two documents and a run's spec."""
LOG_BATCH_BYTES = 32 << 10
"""One ShipLogs request."""
LOG_LINE_BYTES = 8 << 10
"""A longer line of a log is cut, and says so."""
EXCHANGE_CHANNEL_BYTES = MAX_FRAME_BYTES
"""The data channel's limit."""
HANDSHAKE_S = 20.0
"""A connection that has not made a call after so long is closed."""
CONNECTION_LIMITS = (
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
    ("grpc.max_connection_idle_ms", 30_000),
)
"""At every server a connection that has not become HTTP/2, or has no call, for so long is closed.
Whoever needs it again opens another."""
JOIN_BYTES = 64 << 10
"""What a join token is good for: a few certificates and keys."""
LOCAL_MESSAGE_BYTES = 128 << 10
"""One message between a rank and its gateway, on the gateway's Unix socket."""
