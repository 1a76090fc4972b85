"""docklands graph, report and trace: looking at a config or at a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from docklands.cli.shared import ConfigFile, Overrides, RunDir, check_run_dir, read_config


def graph(
    config: ConfigFile,
    overrides: Overrides = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="A mermaid flowchart instead of text.")] = False,
) -> None:
    """Print the dataflow graph of a config: stages, roles, and the columns between them."""
    from docklands.config.summary import arithmetic

    loaded, _ = read_config(config, overrides)
    from docklands.algorithms import build_algorithm
    from docklands.run.routes import as_run

    flow = as_run(loaded, build_algorithm(loaded).graph())
    if mermaid:
        print(flow.to_mermaid())
    else:
        print(f"{loaded.algorithm.name}: {arithmetic(loaded)}\n")
        print(flow.to_text())


def report(run_dir: RunDir) -> None:
    """Write report.html from a run directory; a crashed run works too."""
    check_run_dir(run_dir)
    from docklands.run.report import write_report

    print(write_report(run_dir))


def trace(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option(help="File to write; default: RUN_DIR/trace.json.")] = None,
) -> None:
    """Write the run's spans as a Chrome trace, which Perfetto opens."""
    check_run_dir(run_dir)
    from docklands.obs.spans import export_chrome_trace

    print(export_chrome_trace(run_dir, out or run_dir / "trace.json"))
