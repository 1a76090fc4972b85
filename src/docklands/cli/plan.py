"""docklands plan: memory of each phase and bytes moved, before anything starts."""

from __future__ import annotations

from typing import Annotated

import typer

from docklands.cli.shared import ConfigFile, Overrides, read_config


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        str, typer.Option(help="A published model by name (qwen2.5-32b, ...) instead of model.path.")
    ] = "",
    generation: Annotated[str, typer.Option(help="Generation layout, e.g. tp=2,dp=8; default: dp only.")] = "",
    device_gib: Annotated[float, typer.Option(help="Memory of a device in GiB; 0: this machine's.")] = 0.0,
    transfer: Annotated[
        str, typer.Option(help="method=minimal|allgather_swap|broadcast, bucket_mib=256, node=8 (devices), apart=0|1.")
    ] = "",
) -> None:
    """Print memory per device in training, resharding and generation, and what resharding moves.

    Exit code 2, with what to change, when it does not fit.
    """
    loaded, _ = read_config(config, overrides)
    from docklands.device import choose, memory_capacity
    from docklands.run.plan import GIB, model_of, parse_layout, parse_transfer, plan_run

    capacity = int(device_gib * GIB) if device_gib > 0 else memory_capacity(choose(loaded.run.device))
    target = parse_layout(generation) if generation else None
    found = plan_run(loaded, model_of(loaded, model), target, parse_transfer(transfer), capacity)
    print(found.to_text())
    found.check()
