"""docklands dash: look at runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dash(
    run_dirs: Annotated[
        list[Path], typer.Argument(help="Run directories, running, ended or crashed.", metavar="RUN_DIR...")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is reached from this machine only.")] = (
        "127.0.0.1"
    ),
) -> None:
    """Serve a page that shows runs, live: curves, dataflow, timeline, samples, memory, comparison. Ctrl-C ends it."""
    from docklands.dashboard.server import is_loopback, serve

    server = serve(run_dirs, host, port)
    shown = f"[{host}]" if ":" in host else host
    if not is_loopback(host):
        typer.echo(f"warning: whoever reaches {host} can read these runs: there is no password", err=True)
    typer.echo(f"http://{shown}:{server.port}/")
    server.serve_forever()
