"""`python -m isthmus.sites.gateway`: the process of a gateway."""

import os
import sys

# Read when grpc is imported. A server with fork support on can crash the process.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from isthmus.sites.gateway.main import main

if __name__ == "__main__":
    sys.exit(main())
