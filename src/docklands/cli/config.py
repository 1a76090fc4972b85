"""docklands config show, check and diff."""

from __future__ import annotations

import typer

from docklands.cli.shared import ConfigFile, Overrides, read_config

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
    from docklands.config.summary import arithmetic

    loaded, _ = read_config(config, overrides)
    from docklands.algorithms import build_algorithm

    stages = " -> ".join(stage.name for stage in build_algorithm(loaded).graph().stages)
    print(f"{config}: ok")
    print(f"{loaded.algorithm.name}: {arithmetic(loaded)}; prompts -> {stages}")


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
