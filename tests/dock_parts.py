"""A small graph with every kind of stage, groups and columns to put through a dock, and a flow that runs it all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch

from docklands.core.batch import Batch
from docklands.core.fields import (
    ADVANTAGE,
    COMPLETION,
    GROUP_ID,
    LOSS_MASK,
    PROMPT,
    PROMPT_ID,
    PROMPT_TOKENS,
    REF_LOGPROBS,
    REWARD,
    ROLLOUT_LOGPROBS,
    SAMPLE_INDEX,
    TOKEN_IDS,
    Field,
)
from docklands.core.graph import Graph
from docklands.core.protocols import Outcome, Rows
from docklands.core.stage import By, Learner, Stage
from docklands.dock import Dock, DockOptions

GROUP = 4


def nothing(*_: Any) -> None:
    """Stage functions and losses are not called by the dock."""


def stage(name: str, reads: tuple[Field[Any], ...], writes: tuple[Field[Any], ...], by: By = "group") -> Stage:
    return Stage(name, name, reads, writes, nothing, by)


ROLLOUT = stage("rollout", (PROMPT_TOKENS, PROMPT), (TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS, COMPLETION))
REWARD_STAGE = stage("reward", (COMPLETION,), (REWARD,), "sample")
REF = stage("ref", (TOKEN_IDS,), (REF_LOGPROBS,), "sample")
FILTER = stage("filter", (REWARD,), (), "group")
ADVANTAGE_STAGE = stage("advantage", (REWARD, LOSS_MASK), (ADVANTAGE,), "group")
UPDATE = stage("update", (TOKEN_IDS, LOSS_MASK, ADVANTAGE, REF_LOGPROBS), (), "step")
LEARNER = Learner("actor", "actor", UPDATE.reads, nothing)  # type: ignore[arg-type]

PLAIN = Graph((ROLLOUT, REWARD_STAGE, REF, ADVANTAGE_STAGE, UPDATE), (LEARNER,))
FILTERED = Graph((ROLLOUT, REWARD_STAGE, FILTER, REF, ADVANTAGE_STAGE, UPDATE), (LEARNER,))


def options(prompts: int = 2, **more: Any) -> DockOptions:
    return DockOptions(**{"prompts_per_step": prompts, "group_size": GROUP, "wait_s": 5.0, "lease_s": 60.0, **more})


def rows_of(group: int, n: int = GROUP) -> np.ndarray:
    return np.arange(group * n, group * n + n)


def group(index: int, n: int = GROUP, prompt_id: int | None = None) -> Batch:
    """Group `index`: rows index * n + k."""
    tokens = [[index, 7, 8][: 1 + index % 3]] * n
    return Batch(
        rows_of(index, n),
        {
            PROMPT_ID: torch.full((n,), index if prompt_id is None else prompt_id),
            GROUP_ID: torch.full((n,), index),
            SAMPLE_INDEX: torch.arange(n, dtype=torch.int32),
            PROMPT_TOKENS: tokens,
            PROMPT: [{"prompt": f"p{index}"}] * n,
        },
    )


def length_of(row: int) -> int:
    return 1 + row % 5


def written(of: Stage, row_ids: np.ndarray, salt: int = 0) -> Batch:
    """What `of` writes for rows: every value follows from the row id (and `salt`)."""
    ids = [int(row) for row in row_ids]
    made: dict[Field[Any], Any] = {}
    for field in of.writes:
        if field.is_json:
            made[field] = [f"text {row} {salt}" for row in ids]
        elif field.is_token:
            made[field] = [np.full(length_of(row), row + salt) for row in ids]
        else:
            made[field] = [row + salt for row in ids]
    return Batch(row_ids, made)


async def work(dock: Dock, of: Stage, rows: Rows, dropped: dict[int, str] | None = None) -> None:
    """One run of a stage: read, write, acknowledge."""
    dropped = dropped or {}
    await dock.fetch(rows, of.reads)
    kept = rows.row_ids[~np.isin(rows.row_ids, list(dropped))]
    if of.writes and len(kept):
        await dock.put(written(of, kept))
    await dock.finish(rows, Outcome(dropped))


async def admit_all(dock: Dock, groups: int, first: int = 0) -> None:
    """Admit while slots are free, then say that prompts have ended."""
    for index in range(first, first + groups):
        if not await dock.slots():
            return
        await dock.admit(group(index))
    await dock.end_of_prompts()


async def step(dock: Dock) -> Rows:
    """Every stage once, up to the update's take."""
    for of in dock.graph.upstream_of("update"):
        await work(dock, of, await dock.take(of))
    return await dock.take(dock.graph["update"])


async def admit(dock: Dock, *indices: int) -> None:
    """Groups by index."""
    for index in indices:
        await dock.admit(group(index))


async def raised(kind: type[Exception], call: Coroutine[Any, Any, Any]) -> Exception:
    """The error that `call` must raise."""
    with pytest.raises(kind) as caught:
        await call
    return caught.value


async def started(graph: Graph = PLAIN, groups: int = 2, **more: Any) -> Dock:
    """A dock with groups that have been through rollout."""
    dock = Dock(graph, options(groups, **more))
    for index in range(groups):
        await dock.admit(group(index))
    await work(dock, graph["rollout"], await dock.take(graph["rollout"]))
    return dock


Drops = Callable[[str, Rows], dict[int, str]]


Pause = Callable[[], Awaitable[None]]


async def no_pause() -> None:
    """As fast as it goes."""


async def pump(dock: Dock, of: Stage, seen: list[tuple[str, list[int]]], drops: Drops, pause: Pause) -> None:
    async for rows in dock.stream(of):
        seen.append((of.name, rows.row_ids.tolist()))
        await pause()
        await work(dock, of, rows, drops(of.name, rows))


async def flow(
    dock: Dock,
    groups: int,
    drops: Drops = lambda *_: {},
    pause: Pause = no_pause,
) -> list[tuple[str, list[int]]]:
    """The loop in small: admit, pumps, update; (stage, row ids) of every take, in order of handing out."""
    seen: list[tuple[str, list[int]]] = []
    update = dock.graph["update"]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(admit_all(dock, groups))
        for of in dock.graph.upstream_of("update"):
            tasks.create_task(pump(dock, of, seen, drops, pause))
        async for rows in dock.stream(update):
            seen.append(("update", rows.row_ids.tolist()))
            await pause()
            await dock.fetch(rows, update.reads)
            await dock.retire(rows)
        await dock.close()
    return seen


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main)
