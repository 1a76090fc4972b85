#!/usr/bin/env python
"""The cost model of the dock, measured: the same payload over 1, 2 and 4 warehouses whose links carry 200 Mbit/s.

Every warehouse, and the control process, is a process on a node of its own: a network namespace with its address, its
link shaped by tc, shared memory off. A step of the rows of dock_flow.py (512 prompts x 8, prompts of about 256 tokens,
lognormal responses of 64 to 2,048; token ids and log-probs) is put and then read, 64 rows at a time, through the real
control plane with keys; what is put together lies together, in the warehouses in turn. The model says that time divides
by their number. What goes over the control process's link counts as metadata, over the warehouses' links as payload.

The last lines are JSON: ratio is the speed-up over one warehouse (target: 0.85 x S), or payload / metadata (over 100).
Needs root, for the namespaces.

    python bench/dock_scaling.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).parent)]

from dock_flow_parts.flow import Case, Work, cpu_seconds  # noqa: E402
from dock_scaling_parts.nodes import Nodes, NoNodes  # noqa: E402
from docklands.core.batch import Batch, Jagged, offsets_of  # noqa: E402
from docklands.core.fields import (  # noqa: E402
    GROUP_ID,
    PROMPT_ID,
    PROMPT_TOKENS,
    ROLLOUT_LOGPROBS,
    SAMPLE_INDEX,
    TOKEN_IDS,
)
from docklands.core.graph import Graph  # noqa: E402
from docklands.core.protocols import Rows  # noqa: E402
from docklands.core.stage import Learner, Stage  # noqa: E402
from docklands.dock.distributed import DistributedDock  # noqa: E402
from docklands.dock.launch import Launcher, Program  # noqa: E402
from docklands.dock.rules.options import DockOptions  # noqa: E402
from docklands.errors import TakeTimeout  # noqa: E402

GROUP, COUNTS = 8, (1, 2, 4)
READERS, TAKE = 16, 8
"""Calls under way at once, and groups of a call."""


def nothing(*_: Any) -> None:
    """Stages are run by the bench."""


ROLLOUT = Stage("rollout", "rollout", (PROMPT_TOKENS,), (TOKEN_IDS, ROLLOUT_LOGPROBS), nothing, "group")
UPDATE = Stage("update", "update", (TOKEN_IDS, ROLLOUT_LOGPROBS), (), nothing, "step")
GRAPH = Graph(
    (ROLLOUT, UPDATE),
    (Learner("actor", "actor", UPDATE.reads, nothing),),  # type: ignore[arg-type]
    (PROMPT_ID, GROUP_ID, SAMPLE_INDEX, PROMPT_TOKENS),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 2 warehouses, an eighth of the bytes, one round")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds for each number of warehouses")
    parser.add_argument("--mbit", type=int, default=200, help="rate of each link")
    parser.add_argument("--prompts", type=int, default=512, help="prompts of a step, 8 rows each")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of every row; 0: as in dock_flow.py")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.mbit) < 1 or options.tokens < 0 or options.prompts < TAKE:
        parser.error(f"--rounds and --mbit are at least 1, --tokens is not negative, --prompts at least {TAKE}")
    if options.quick:
        options.rounds, options.prompts = 1, 64
    return options


def lengths_of(options: argparse.Namespace) -> np.ndarray:
    """Tokens of each row of a step."""
    prompts = options.prompts // TAKE * TAKE
    drawn = Work(Case(prompts=prompts, group=GROUP)).lengths
    return np.full(len(drawn), options.tokens) if options.tokens else drawn


def placed(nodes: Nodes) -> Any:
    """Starts the control process on node 0 and warehouse i on node 1 + i."""

    def spawn(module: str, made: Any, errors: Path) -> Program:
        node = 0 if module.endswith("control.server") else 1 + made.place
        made = msgspec.structs.replace(made, endpoint=f"tcp://{nodes.address(node)}:*")
        made = made if node == 0 else msgspec.structs.replace(made, shared_bytes=0)
        return Program(module, made, errors, ("ip", "netns", "exec", Path(nodes.path(node)).name))

    return spawn


def prompts(first: int, count: int) -> Batch:
    """Groups first.. as they are admitted."""
    groups = np.arange(first, first + count).repeat(GROUP)
    ids = np.arange(first * GROUP, (first + count) * GROUP)
    tokens = Jagged(torch.ones(3 * len(ids), dtype=torch.int32), offsets_of(np.full(len(ids), 3)))
    columns = {PROMPT_ID: groups, GROUP_ID: groups, SAMPLE_INDEX: ids % GROUP, PROMPT_TOKENS: tokens}
    return Batch(ids, columns)


def sampled(rows: Rows, lengths: np.ndarray) -> Batch:
    """A response for each row: 8 bytes a token."""
    offsets = offsets_of(lengths[rows.row_ids % len(lengths)])
    ids = torch.arange(int(offsets[-1]), dtype=torch.int32)
    return Batch(rows.row_ids, {TOKEN_IDS: Jagged(ids, offsets), ROLLOUT_LOGPROBS: Jagged(ids.float(), offsets)})


async def step(dock: DistributedDock, number: int, lengths: np.ndarray) -> float:
    """One step through the dock; the seconds that the payload took, in and out."""
    groups = len(lengths) // GROUP
    for first in range(number * groups, (number + 1) * groups, TAKE):
        await dock.admit(prompts(first, TAKE), first // TAKE % dock.places)
    taken = [await dock.take(ROLLOUT, groups=TAKE) for _ in range(groups // TAKE)]
    made = [sampled(rows, lengths) for rows in taken]
    gate = asyncio.Semaphore(READERS)

    async def put(rows: Rows, batch: Batch) -> None:
        async with gate:
            await dock.complete(rows, batch)

    async def get(rows: Rows) -> None:
        async with gate:
            await dock.fetch(rows, UPDATE.reads)

    began = time.perf_counter()
    await asyncio.gather(*(put(rows, batch) for rows, batch in zip(taken, made)))
    rows = await dock.take(UPDATE)
    await asyncio.gather(*(get(part) for part in rows.minibatches(TAKE * GROUP)))
    took = time.perf_counter() - began
    await dock.retire(rows)
    return took


async def measure(made: Launcher, options: argparse.Namespace, nodes: Nodes) -> tuple[list[float], float, float]:
    """Seconds of each round, metadata / payload, and CPU seconds of all processes in a round."""
    async with DistributedDock(made.graph, made.options, made.address, "bench") as dock:
        rows = lengths_of(options)
        await step(dock, 0, np.minimum(rows, 20))
        for node in range(1 + made.options.warehouses):
            nodes.shape(node, options.mbit)
        before, cpu = [nodes.carried(node) for node in range(nodes.count)], cpu_seconds()
        laps = [await step(dock, 1 + n, rows) for n in range(options.rounds)]
        cpu = (cpu_seconds() - cpu) / options.rounds
        used = [nodes.carried(node) - old for node, old in enumerate(before)]
    return laps, used[0] / sum(used[1:]), cpu


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    alone: list[float] = []
    try:
        for count in COUNTS[:2] if options.quick else COUNTS:
            dock = DockOptions(options.prompts // TAKE * TAKE, GROUP, warehouses=count, wait_s=120.0)
            with Nodes(1 + count) as nodes, tempfile.TemporaryDirectory(prefix="dock_scaling_") as work:
                with Launcher(GRAPH, dock, Path(work), spawn=placed(nodes)) as made:
                    laps, share, cpu = asyncio.run(measure(made, options, nodes))
            alone = alone or laps
            took = ", ".join(f"{lap:.2f} s" for lap in laps)
            print(f"{count} warehouses: {took}; {cpu:.2f} s of CPU a round; metadata {share:.2%}", flush=True)
            speed = [statistics.median(alone) / lap for lap in laps]
            lines.append(
                line(f"dock_scaling/{count}", "wall_s", statistics.median(laps), statistics.median(alone), speed)
            )
            lines.append(line(f"dock_scaling/{count}", "metadata", share, 1.0, [1 / share]))
    except NoNodes as error:
        raise SystemExit(f"dock_scaling: no network namespaces here: {error}\nhint: run it as root") from None
    except TakeTimeout as error:
        raise SystemExit(f"dock_scaling: {error}") from None
    for found in lines:
        print(json.dumps(found))
    return 0


def line(bench: str, metric: str, ours: float, peer: float, ratios: list[float]) -> dict[str, Any]:
    """A result in the form of all benches."""
    spread = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
    ours, peer = float(f"{ours:.4g}"), float(f"{peer:.4g}")
    found = {"bench": bench, "metric": metric, "ours": ours, "peer": peer, "ratio": float(f"{peer / ours:.4g}")}
    return {**found, "n": len(ratios), "spread": [float(f"{value:.3g}") for value in spread]}


if __name__ == "__main__":
    sys.exit(main())
