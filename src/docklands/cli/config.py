"""docklands config show, check, diff and convert."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from docklands.cli.shared import ConfigFile, Overrides, read_config
from docklands.errors import ConfigError

app = typer.Typer(help="Look at configurations.", no_args_is_help=True)


@app.command()
def show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print every key with its value and where the value comes from."""
    from docklands.config.load import resolved_yaml

    loaded, sources = read_config(config, overrides)
    print(resolved_yaml(loaded, sources), end="")


@app.command()
def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config, its algorithm and its graph; nothing is started."""
    from docklands.config.summary import arithmetic, without_effect

    loaded, _ = read_config(config, overrides)
    from docklands.algorithms import build_algorithm

    graph = build_algorithm(loaded).graph()
    stages = " -> ".join(stage.name for stage in graph.stages)
    print(f"{config}: ok")
    print(f"{loaded.algorithm.name}: {arithmetic(loaded)}; prompts -> {stages}")
    if idle := without_effect(loaded, "rollout" in graph.roles):
        print(idle)


@app.command()
def diff(left: ConfigFile, right: ConfigFile) -> None:
    """Print the keys in which two configs differ."""
    from docklands.config.load import diff_configs
    from docklands.config.yaml_io import flow

    rows = diff_configs(read_config(left, None)[0], read_config(right, None)[0])
    for name, a, b in rows:
        print(f"{name}: {flow(a)} -> {flow(b)}")
    if not rows:
        print("no difference")


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="YAML; for verl also a .sh script, for TRL also a .py script.")],
    system: Annotated[str, typer.Option("--from", help="mindspeed_rl, verl or trl.")],
    out: Annotated[Path | None, typer.Option(help="Write here instead of printing.")] = None,
) -> None:
    """Translate another system's configuration; every key of it is mapped, or told with a reason."""
    from docklands.config.convert.base import KINDS
    from docklands.config.convert.files import convert_file

    found = convert_file(file, system)
    from docklands.algorithms import build_algorithm

    build_algorithm(found.config).graph()
    text = found.to_yaml()
    if out is None:
        print(text, end="")
    elif out.exists():
        raise ConfigError(f"{out} exists", "choose another name with --out")
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{out}: {error.strerror}") from None
    counts = ", ".join(f"{found.count(kind)} {kind}" for kind in KINDS)
    print(f"{found.system.title}: {counts}" + ("" if out is None else f"; wrote {out}"), file=sys.stderr)
