"""docklands fleet scale: another number of generators for a running job."""

from __future__ import annotations

from typing import Annotated

import typer

from docklands.cli.shared import RunDir, check_run_dir, read_config

MOST = 4096
"""Replicas that may be asked for: a slip of the pen starts no million processes."""

app = typer.Typer(help="Change the processes of a running job.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Change the processes of a running job."""


@app.command("scale")
def scale(
    run_dir: RunDir,
    generators: Annotated[int, typer.Argument(min=1, max=MOST, metavar="N", help="Replicas that should generate.")],
) -> None:
    """Have N replicas generate from now on: new ones join with the weights of the moment, those that leave end what
    they have begun. For fleet.placement=disaggregated; it holds for a resumed run, too.
    """
    import json

    from docklands.dashboard.runs import is_locked
    from docklands.errors import ConfigError
    from docklands.obs.files import write_json

    check_run_dir(run_dir)
    config, _ = read_config(run_dir, None)
    if config.fleet.placement != "disaggregated":
        raise ConfigError(
            f"the generators of {run_dir} are the trainers' processes", "fleet.placement=disaggregated has their own"
        )
    write_json(run_dir / "fleet.json", {"generators": generators})
    if not is_locked(run_dir / ".lock"):
        typer.echo("no process of this machine is at work on it: it holds for one elsewhere, or once resumed", err=True)
    print(json.dumps({"generators": generators}))
