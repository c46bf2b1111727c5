"""`python -m sites.gateway`: the process of a gateway."""

import os
import sys

# Read when grpc is imported. A server with fork support on can crash the process.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# A socket wakes its reader when the frame is there, or nearly, and not for each packet of it; and
# who waits for the event reads it, instead of a thread of another pool.
os.environ.setdefault(
    "GRPC_EXPERIMENTS",
    "tcp_rcv_lowat,tcp_frame_size_tuning,-event_engine_client,-event_engine_listener",
)

from sites.gateway.main import main

if __name__ == "__main__":
    sys.exit(main())
