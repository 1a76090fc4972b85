"""docklands eval"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from docklands.cli.shared import ConfigFile, Overrides, read_config


def evaluate(
    run_or_config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint directory or step; default: the last.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 1,
    k: Annotated[list[int] | None, typer.Option(min=1, help="pass@k; may be given several times.")] = None,
) -> None:
    """Held-out evaluation: mean@N, best@N, maj@N and pass@k, with 95 % bootstrap intervals over prompts.

    maj@N is the reward of the most frequent answer, as the verifier read it, else of the whole completion; pass@k
    counts rewards of 1 or more. Prints a table and, as its last line, one JSON object. The run directory stays as
    it is.
    """
    from docklands.errors import ConfigError

    ks = sorted(set(k or []))
    if ks and ks[-1] > n:
        raise ConfigError(f"pass@{ks[-1]} needs at least {ks[-1]} samples per prompt, --n is {n}", f"--n {ks[-1]}")
    loaded, sources = read_config(run_or_config, overrides)
    from docklands.run.main import evaluate_run

    result = evaluate_run(loaded, sources, checkpoint, n, ks)
    print(table(result))
    print(json.dumps(result, sort_keys=True, default=str))


def table(result: Mapping[str, Any]) -> str:
    """One line per figure, its interval behind it."""
    names = [name for name in result if not name.endswith(("_low", "_high"))]
    width = max((len(name) for name in names), default=0)
    lines = []
    for name in names:
        value = result[name]
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        if f"{name}_low" in result and f"{name}_high" in result:
            text += f"  [{result[f'{name}_low']:.4f}, {result[f'{name}_high']:.4f}]"
        lines.append(f"{name:<{width}}  {text}")
    return "\n".join(lines)
