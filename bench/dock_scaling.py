#!/usr/bin/env python
"""The cost model of the dock, measured: the same payload over 1, 2 and 4 warehouses whose links carry 200 Mbit/s.

Every warehouse, and the control process, is a process on a node of its own: a network namespace with its address, its
link shaped by tc, shared memory off. A step of rows is put (token ids and log-probs) and then read, through the real
control plane with keys; rows are spread over the warehouses in turn. The model says that time divides by their number;
metadata is what goes over the control process's link, payload what goes over the warehouses'.

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
from docklands.core.protocols import Outcome, Rows  # noqa: E402
from docklands.core.stage import Learner, Stage  # noqa: E402
from docklands.dock.distributed import DistributedDock  # noqa: E402
from docklands.dock.launch import Launcher, Program  # noqa: E402
from docklands.dock.options import DockOptions  # noqa: E402
from docklands.errors import TakeTimeout  # noqa: E402

GROUPS, GROUP, COUNTS = 64, 8, (1, 2, 4)
READERS, TAKE = 8, 4


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
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens of a row")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.mbit, options.tokens) < 1:
        parser.error("--rounds, --mbit and --tokens are at least 1")
    if options.quick:
        options.rounds, options.tokens = 1, max(1, options.tokens // 8)
    return options


def placed(nodes: Nodes) -> Any:
    """Starts the control process on node 0 and warehouse i on node 1 + i."""

    def spawn(module: str, made: Any, errors: Path) -> Program:
        node = 0 if module.endswith("control_server") else 1 + made.place
        made = msgspec.structs.replace(made, endpoint=f"tcp://{nodes.address(node)}:*")
        made = made if node == 0 else msgspec.structs.replace(made, shared_bytes=0)
        return Program(module, made, errors, ("ip", "netns", "exec", Path(nodes.path(node)).name))

    return spawn


def prompts(group: int) -> Batch:
    ids = np.arange(group * GROUP, (group + 1) * GROUP)
    return Batch(
        ids,
        {
            PROMPT_ID: [group] * GROUP,
            GROUP_ID: [group] * GROUP,
            SAMPLE_INDEX: list(range(GROUP)),
            PROMPT_TOKENS: [[1, 2, 3]] * GROUP,
        },
    )


def sampled(rows: Rows, tokens: int) -> Batch:
    """A response for each row: 8 bytes a token."""
    offsets = offsets_of(np.full(len(rows), tokens))
    ids = torch.arange(len(rows) * tokens, dtype=torch.int32)
    return Batch(rows.row_ids, {TOKEN_IDS: Jagged(ids, offsets), ROLLOUT_LOGPROBS: Jagged(ids.float(), offsets)})


async def step(dock: DistributedDock, first: int, tokens: int) -> float:
    """One step through the dock; the seconds that the payload took, in and out."""
    for group in range(first, first + GROUPS):
        await dock.admit(prompts(group))
    taken = [await dock.take(ROLLOUT, groups=TAKE) for _ in range(GROUPS // TAKE)]
    made = [sampled(rows, tokens) for rows in taken]
    gate = asyncio.Semaphore(READERS)

    async def put(rows: Rows, batch: Batch) -> None:
        async with gate:
            await dock.put(batch)
            await dock.finish(rows, Outcome())

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


async def measure(made: Launcher, options: argparse.Namespace, nodes: Nodes) -> tuple[list[float], float]:
    """Seconds of each round, and metadata / payload."""
    async with DistributedDock(made.graph, made.options, made.address, "bench") as dock:
        await step(dock, 0, max(1, options.tokens // 20))
        for node in range(1 + made.options.warehouses):
            nodes.shape(node, options.mbit)
        before = [nodes.carried(node) for node in range(nodes.count)]
        laps = [await step(dock, (1 + n) * GROUPS, options.tokens) for n in range(options.rounds)]
        used = [nodes.carried(node) - old for node, old in enumerate(before)]
    return laps, used[0] / sum(used[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    alone: list[float] = []
    try:
        for count in COUNTS[:2] if options.quick else COUNTS:
            dock = DockOptions(GROUPS, GROUP, warehouses=count, wait_s=120.0)
            with Nodes(1 + count) as nodes, tempfile.TemporaryDirectory(prefix="dock_scaling_") as work:
                with Launcher(GRAPH, dock, Path(work), spawn=placed(nodes)) as made:
                    laps, share = asyncio.run(measure(made, options, nodes))
            alone = alone or laps
            print(f"{count} warehouses: {', '.join(f'{lap:.2f} s' for lap in laps)}; metadata {share:.2%}", flush=True)
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
