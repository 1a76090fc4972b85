"""docklands plan: memory of each phase, bytes moved and the time of a step, before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from docklands.cli.shared import ConfigFile, Overrides, read_config
from docklands.errors import ConfigError

if TYPE_CHECKING:
    from docklands.config.schema import Config
    from docklands.models.config import ModelConfig
    from docklands.parallel.layout import Layout


@dataclass(frozen=True)
class Asked:
    """The arguments of the command."""

    config: ConfigFile
    overrides: Overrides = None
    model: Annotated[str, typer.Option(help="A published model by name (qwen2.5-32b, ...) instead of model.path.")] = ""
    generation: Annotated[
        str, typer.Option(help="Generation layout, e.g. tp=2,dp=8; default: rollout.layout, else dp only.")
    ] = ""
    device_gib: Annotated[
        float, typer.Option(help="Memory of a device in GiB; 0: --hardware's, else this machine's.")
    ] = 0.0
    transfer: Annotated[
        str,
        typer.Option(
            help="method=minimal|allgather_swap|broadcast, bucket_mib=256, node=8 (devices), apart=0|1, dtype=fp8; "
            "default: as in sync and fleet."
        ),
    ] = ""
    hardware: Annotated[
        str, typer.Option(help="Predict time on h100, ascend-910b, ascend-910c, or as a YAML file describes.")
    ] = ""
    lengths: Annotated[
        str, typer.Option(help="lognormal:mean=M,max=X,sigma=1,prompt=P, fixed:tokens=N, or a run directory.")
    ] = ""
    dropped: Annotated[float, typer.Option(min=0, max=0.99, help="Share of groups that the filter drops.")] = 0.0
    calibrate: Annotated[
        Path | None, typer.Option(help="Measure this machine with the config's model; write its figures here.")
    ] = None


def with_arguments(kind: type[Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """A command whose arguments are the fields of a dataclass, which it gets as one."""

    def wrap(run: Callable[[Any], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            run(kind(**given))

        command.__doc__, command.__name__ = run.__doc__, run.__name__
        hints = get_type_hints(kind, include_extras=True)
        named = [p.replace(annotation=hints[p.name]) for p in inspect.signature(kind).parameters.values()]
        command.__annotations__ = hints
        command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        return command

    return wrap


@with_arguments(Asked)
def plan(asked: Asked) -> None:
    """Print memory per device in training, resharding and generation, what resharding moves, and the predicted step.

    Exit code 2, with what to change, when it does not fit.
    """
    loaded, _ = read_config(asked.config, asked.overrides)
    from docklands.run.hardware import find_hardware
    from docklands.run.plan import generation_layout, model_of, parse_transfer, plan_run, ranks_of

    shape = model_of(loaded, asked.model)
    if asked.calibrate is not None:
        measure(loaded, shape, asked.calibrate)
    machine = find_hardware(asked.hardware) if asked.hardware else None
    target = generation_layout(asked.generation)
    options = parse_transfer(asked.transfer, loaded)
    given = device_bytes(asked.device_gib) or (int(machine.capacity) if machine else 0)
    check_device(loaded, given, target)
    capacity = given or own_capacity(loaded, ranks_of(loaded, shape, target))
    found = plan_run(loaded, shape, target, options, capacity)
    print(found.to_text())
    if machine is not None and machine.node != options.node:
        print(f"{machine.name}: nodes of {machine.node} devices, planned for {options.node}: set sync.node_devices")
    found.check()
    if machine is not None:
        from docklands.run.forecast import Case, forecast
        from docklands.run.lengths import read_lengths

        lengths = read_lengths(asked.lengths, loaded)
        print("\n" + forecast(loaded, found, Case(machine, lengths, dropped=asked.dropped)).to_text())
    elif asked.lengths or asked.dropped:
        raise ConfigError("--lengths and --dropped predict time", "name the machine: --hardware h100")


def device_bytes(gib: float) -> int:
    """ConfigError for what is no size of a device."""
    from docklands.run.plan import GIB

    if gib and not 1 <= gib * GIB <= 1 << 50:  # also nan and inf
        raise ConfigError(f"--device-gib {gib:g}: no size of a device", "in GiB; 0: --hardware's, else this machine's")
    return int(gib * GIB)


def check_device(config: Config, elsewhere: int, target: Layout | None) -> None:
    """ConfigError for what a run refuses. elsewhere: not of this machine, so whichever device the swap is for."""
    from docklands.device import choose
    from docklands.run.plan import check_run

    fitting = "cpu" if config.sync.swap == "disk" else "cuda"
    check_run(config, fitting if elsewhere else choose(config.run.device).type, target)


def own_capacity(config: Config, ranks: int) -> int:
    """Bytes of a device of this machine: ranks on its CPU share its memory."""
    from docklands.device import choose, memory_capacity

    device = choose(config.run.device)
    shared = device.type == "cpu" and config.fleet.backend == "local"
    return memory_capacity(device) // (ranks if shared else 1)


def measure(config: Config, shape: ModelConfig, out: Path) -> None:
    """Write the figures of this machine."""
    from docklands.run.calibrate import calibrate

    found = calibrate(config, shape)
    try:
        out.write_text(found.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}") from None
    print(f"measured this machine: {out}\n")
