"""`isthmus dashboard`: shows runs in a browser until Ctrl-C."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import FOLDER, home_option, with_output
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.run_dashboard import HOST, PORT, require_dashboard
from isthmus.orchestrator.interruption import run_command
from isthmus.orchestrator.run_folder.home import home_folder


@click.command("dashboard")
@click.option("--host", default=HOST, help="Listen at this address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    help="And at this port; 0 lets the system choose.",
)
@click.option(
    "--state",
    type=FOLDER,
    help="Show the runs of the coordinator with this state folder, not those of HOME.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    help="A name by which browsers reach it, beside --host. May be repeated.",
)
@click.option(
    "--token/--no-token",
    "wants_token",
    default=True,
    help="Without a token, on loopback, every user of this machine can read.",
)
@click.option(
    "--allow-actions",
    is_flag=True,
    help="Let whoever has the address, token and all, stop runs, as `isthmus cancel` does.",
)
@home_option
@with_output
def command(
    output: Output,
    host: str,
    port: int,
    state: Path | None,
    names: tuple[str, ...],
    wants_token: bool,
    allow_actions: bool,
    home: Path | None,
) -> int:
    """Show runs in a browser, live, until Ctrl-C.

    Nothing can be changed there without --allow-actions.

    The first line is its address, with a token, without which it shows nothing.
    """
    require_dashboard()
    from isthmus.orchestrator.dashboard.access import Access, is_loopback, new_token
    from isthmus.orchestrator.dashboard.server import listen, serve

    try:
        listener = listen(host, port)
    except OSError as error:
        raise CommandError(
            "REFUSED",
            f"cannot listen at {host}, port {port}: {error.strerror}",
            hint="Name another --port, or --port 0; --host is an address of this machine.",
        ) from error
    port = listener.getsockname()[1]
    has_token = wants_token or allow_actions or not is_loopback(host)
    token = new_token() if has_token else ""
    url = f"http://{_in_url(host)}:{port}/" + (f"?token={token}" if token else "")
    with listener:
        if output.as_json:
            output.note(url)
        else:
            output.text(url)
        access = Access(host, port, token, names, allow_actions)
        run_command(lambda: serve(listener, access, home_folder(home), state))
    return output.result({"url": url})


def _in_url(host: str) -> str:
    """Return the host as an address has it; of all of this machine's, its name."""
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - it is asked about, not bound
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
