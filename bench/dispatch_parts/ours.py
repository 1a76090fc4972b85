"""Our side: the loop's own pumps, roles and worker processes, on a dock in processes of its own.

As in a colocated run, the workers' devices are handed from role to role by a lease; rewards and advantages are roles in
the driver. The worker is the fleet's (`fleet.engines.EngineShard`: read this rank's part, compute, write), with
`work.Model` in the place of a train engine. The driver admits a step's prompts at once.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from dispatch_parts import work  # noqa: E402
from dispatch_parts.work import WORKERS, Case  # noqa: E402
from docklands.core.batch import Batch, Jagged, offsets_of  # noqa: E402
from docklands.core.fields import (  # noqa: E402
    ADVANTAGE,
    GROUP_ID,
    LOSS_MASK,
    PROMPT_TOKENS,
    REF_LOGPROBS,
    REWARD,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
)
from docklands.core.graph import UPDATE, Graph  # noqa: E402
from docklands.core.protocols import Outcome, Rows  # noqa: E402
from docklands.core.stage import Learner, Stage  # noqa: E402
from docklands.dock.hosted import HostedDock  # noqa: E402
from docklands.dock.rules.options import DockOptions  # noqa: E402
from docklands.fleet.engines import EngineShard  # noqa: E402
from docklands.fleet.host import Context, Setup  # noqa: E402
from docklands.fleet.local_backend import Device, LocalRole  # noqa: E402
from docklands.fleet.local_carrier import LocalCarrier  # noqa: E402
from docklands.fleet.reader import reader_of, with_read  # noqa: E402
from docklands.fleet.worker_role import WorkerRole  # noqa: E402
from docklands.fleet.workers import Workers  # noqa: E402
from docklands.parallel.layout import Layout  # noqa: E402
from docklands.run.loop import pump  # noqa: E402

FIELDS = {field.name: field for field in (TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS, REF_LOGPROBS, ADVANTAGE)}


def jagged(values: np.ndarray, lengths: np.ndarray) -> Jagged:
    return Jagged(torch.from_numpy(values), offsets_of(lengths))


def run_rollout(model: work.Model, batch: Batch) -> Batch:
    lengths, columns = model.rollout(batch.row_ids)
    return Batch(batch.row_ids, {FIELDS[name]: jagged(values, lengths) for name, values in columns.items()})


def run_ref(model: work.Model, batch: Batch) -> Batch:
    tokens = batch[TOKEN_IDS]
    return Batch(batch.row_ids, {REF_LOGPROBS: jagged(work.logprobs(tokens.values.numpy()), tokens.lengths)})


def run_reward(_: Any, batch: Batch) -> Batch:
    tokens = batch[TOKEN_IDS]
    return Batch(batch.row_ids, {REWARD: torch.from_numpy(work.rewards(tokens.lengths, tokens.values.numpy()))})


def run_advantage(group: int, batch: Batch) -> Batch:
    return Batch(batch.row_ids, {ADVANTAGE: torch.from_numpy(work.advantages(batch[REWARD].numpy(), group))})


def run_update(_: Any, batch: Batch) -> Batch:
    raise NotImplementedError("learners update")


STAGES = (
    Stage("rollout", "rollout", (GROUP_ID, PROMPT_TOKENS), (TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS), run_rollout),
    Stage("ref_logprobs", "reference", (TOKEN_IDS,), (REF_LOGPROBS,), run_ref),
    Stage("reward", "reward", (TOKEN_IDS,), (REWARD,), run_reward),
    Stage("advantage", "advantage", (REWARD,), (ADVANTAGE,), run_advantage),
    Stage(UPDATE, "actor", tuple(FIELDS.values()), (), run_update, "step"),
)
LEARNER = Learner("actor", "actor", STAGES[-1].reads, run_update)  # type: ignore[arg-type]
GRAPH = Graph(STAGES, (LEARNER,), (GROUP_ID, PROMPT_TOKENS))


class Model(work.Model):
    """As an engine."""

    replicas_meet = False  # each holds all of the model, as with layout.dp

    def update(self, batch: Batch, learner: Learner) -> dict[str, tuple[float, float]]:
        columns = {field.name: batch[field] for field in learner.reads}
        arrays = {name: (c.values if isinstance(c, Jagged) else c).numpy() for name, c in columns.items()}
        return {"total": (work.update(arrays, batch[TOKEN_IDS].lengths), 1.0)}


class Shard(EngineShard):
    """One worker."""

    def __init__(self, context: Context, case: Case) -> None:
        assert context.mesh is not None
        self.context, self.reader = context, reader_of(context, context.mesh)
        self.engine = self.policy = Model(case)  # type: ignore[assignment]


class Remote:
    """The workers, as a role's resource."""

    def __init__(self, workers: Workers, case: Case) -> None:
        self.workers = workers
        workers.make("model", Shard, case)

    def run_stage(self, stage: Stage, rows: Rows) -> list[Outcome | None]:
        return self.workers.call("model", "run_stage", stage, rows)

    def update(self, rows: Rows, learner: Learner) -> dict[str, tuple[float, float]]:
        found = self.workers.call("model", "update", rows, learner)
        return with_read({"total": (sum(each["total"][0] for each in found), 1.0)}, found)


class Ours:
    """The driver."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, Model(case)
        self._folder = tempfile.TemporaryDirectory(prefix="dispatch_ours_")
        folder = Path(self._folder.name)
        groups = case.chunk * WORKERS // case.group
        self.dock = HostedDock(GRAPH, DockOptions(case.prompts, case.group, groups_per_take=groups), folder / "dock")
        self.workers = Workers(Setup(Layout(dp=WORKERS), wait_s=120.0, log=folder / "log"), LocalCarrier())
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._open())

    async def _open(self) -> None:
        await self.dock.open()
        shared, remote = Device("workers"), Remote(self.workers, self.case)
        self.fleet: dict[str, LocalRole] = {
            name: WorkerRole(name, remote, self.dock, shared) for name in ("rollout", "reference", "actor")
        }
        for name, resource in (("reward", None), ("advantage", self.case.group)):
            self.fleet[name] = LocalRole(name, resource, self.dock, Device(name))
        self._pumps = [
            asyncio.ensure_future(self.fleet[stage.role].serve(stage, partial(pump, self.dock)))  # type: ignore[arg-type]
            for stage in GRAPH.upstream_of(UPDATE)
        ]

    def step(self, number: int) -> float:
        return self._loop.run_until_complete(self._step(number))

    async def _step(self, number: int) -> float:
        case = self.case
        row_ids = np.arange(number * case.rows, (number + 1) * case.rows)
        groups = row_ids // case.group
        prompts = [self.model.prompt_tokens(group) for group in groups[:: case.group].tolist()]
        rows = [prompt for prompt in prompts for _ in range(case.group)]
        tokens = jagged(np.concatenate(rows), np.array([len(row) for row in rows]))
        await self.dock.admit(Batch(row_ids, {GROUP_ID: torch.from_numpy(groups), PROMPT_TOKENS: tokens}))
        taking = asyncio.ensure_future(self.dock.take(GRAPH[UPDATE]))
        done, _ = await asyncio.wait([taking, *self._pumps], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {taking}:
            task.result()  # a pump ends early only by an error
        rows = await taking
        total = (await self.fleet["actor"].update(LEARNER, rows))["total"][0]
        await self.dock.retire(rows)
        return total

    def close(self) -> None:
        self._loop.run_until_complete(self._close())
        self.workers.close()
        for role in self.fleet.values():
            role.device.close()
        self._loop.close()
        self._folder.cleanup()

    async def _close(self) -> None:
        await self.dock.close()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self.dock.leave()


def main() -> None:
    torch.set_num_threads(1)
    case, rounds = work.arguments(sys.argv[1:])
    ours = Ours(case)
    work.side(ours.step, case, rounds, ours.close)


if __name__ == "__main__":
    from dispatch_parts.ours import main as run  # under the name that worker processes know its functions by

    run()
