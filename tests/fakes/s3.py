"""A real S3 server, moto's, in a process of its own, so that a test can measure its own memory.

`python -m tests.fakes.s3` prints the port. GET /-/BUCKET has requests for a bucket refused, as
those for a region that is gone, until it is asked for again.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote
from urllib.request import Request, urlopen

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKETS = ("europe", "america")
_REFUSED = b"<Error><Code>AccessDenied</Code><Message>the region is gone</Message></Error>"


class S3:
    """A server with two empty buckets, BUCKETS."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._num_given = 0

    def url(self, bucket: str = "europe") -> str:
        """Return a new place in a bucket, with a name that tools take for a pattern."""
        self._num_given += 1
        return f"s3://{bucket}/läufe [v1.2] no. {self._num_given}"

    @contextmanager
    def without(self, bucket: str) -> Iterator[None]:
        """Refuse all requests for a bucket in the block."""
        self.ask(f"-/{bucket}")
        yield
        self.ask(f"-/{bucket}")

    def ask(self, path: str, method: str = "GET") -> None:
        """Send a request, and have it succeed."""
        urlopen(Request(f"{self.address}/{path}", method=method), timeout=30).close()


@contextmanager
def s3_server() -> Iterator[S3]:
    """Start a server; end it with the block."""
    command = [sys.executable, "-m", "tests.fakes.s3"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        server = S3(f"http://127.0.0.1:{int(process.stdout.readline())}")
        for bucket in BUCKETS:
            server.ask(bucket, "PUT")
        yield server
    finally:
        process.kill()
        process.communicate(timeout=30)


def main() -> None:
    """Serve until killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    refused: set[str] = set()
    moto: Any = DomainDispatcherApplication(create_backend_app)

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        _, first, *rest = unquote(environ["PATH_INFO"]).split("/")
        if first == "-":
            refused.symmetric_difference_update(rest)
        if first in refused or first == "-":
            start("200 OK" if first == "-" else "403 Forbidden", [])
            return [_REFUSED]
        answer: Iterable[bytes] = moto(environ, start)
        return answer

    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
