"""Size limits per kind of message. gRPC's own limits are set from these, never to -1."""

CONTROL_MESSAGE_BYTES = 64 << 10
"""Limit on session, status and event messages: everything small and frequent."""
DOCUMENT_BYTES = 1 << 20
"""Limit on a YAML file."""
RUN_SPEC_BYTES = 8 << 20
"""Limit on a run's spec, which lists every link: a mesh of 32 sites has half a MiB."""
PASSED_ENV_BYTES = 16 << 10
"""Limit on all variables together that a job passes on to its ranks."""
BLOB_PART_BYTES = 1 << 20
"""Longest part of a carried file: several pass in the time of one heartbeat on a slow link."""
CARRIED_BYTES = 512 << 20
"""Limit on all files of a folder that is carried to sites."""
CARRIED_FILES = 20_000
"""Limit on their number: their names are one message."""
CONTROL_CHANNEL_BYTES = 3 * DOCUMENT_BYTES + RUN_SPEC_BYTES
"""The control channel's limit: Prepare carries two documents and a run's spec."""
LOG_BATCH_BYTES = 32 << 10
"""Limit on one ShipLogs request."""
LOG_LINE_BYTES = 8 << 10
"""Longest log line; a longer one is cut and marked."""
EXCHANGE_CHANNEL_BYTES = 17 << 20
"""The data channel's limit: the longest frame."""
HANDSHAKE_S = 20.0
"""Time after which a connection without a call is closed."""
CONNECTION_LIMITS = (
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
    ("grpc.max_connection_idle_ms", 30_000),
)
"""Options of every server: a connection that has not become HTTP/2, or has no call, for HANDSHAKE_S
is closed. A client that needs it again opens another."""
REVOCATIONS_BYTES = 256 << 10
"""Limit on the list of revoked certificates: some thousands."""
JOIN_BYTES = 64 << 10
"""Limit on the files of a join token: a few certificates and keys."""
LOCAL_MESSAGE_BYTES = 128 << 10
"""Limit on a message between a rank and its gateway, on the gateway's Unix socket."""
