"""The loop. Everything that Docklands does passes through these lines; read this file first.

Two circles close here and nowhere else: weights (publish) and slots (retire). No algorithm, no mode and no engine is
named: synchronous or asynchronous is `max_staleness`, colocated or disaggregated is a lease, an algorithm is a graph,
dynamic sampling is a stage that drops rows. The driver holds row ids and numbers; it touches no tensor.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from docklands.core.graph import UPDATE
from docklands.errors import DockClosed, WarehouseLost

if TYPE_CHECKING:
    from docklands.core.protocols import Dock, Role
    from docklands.core.stage import Stage
    from docklands.run.prompts import Prompts
    from docklands.run.session import Run


async def train(run: Run) -> None:
    """theta_v -> rollout -> reward -> logprobs -> advantage -> update -> theta_{v+1} -> publish."""
    graph, dock, fleet = run.graph, run.dock, run.fleet
    await run.weights.publish(version=run.step)  # every generator holds theta_step
    await run.before_training()
    async with asyncio.TaskGroup() as flow:  # any pump's error ends the run, loudly
        flow.create_task(admit(run.prompts, dock))
        for stage in graph.upstream_of(UPDATE):
            flow.create_task(fleet[stage.role].serve(stage, partial(pump, dock)))  # a pump, or one for each replica
        for step in run.steps_left():
            with run.step_scope(step) as metrics:
                rows = await run.take_step(metrics)
                for minibatch in run.minibatches(rows):
                    for learner in run.learners(step):  # actor, and critic for PPO
                        metrics.merge(await fleet[learner.role].update(learner, minibatch))
                await run.before_publish(step)  # a checkpoint's copy, while training state is on its device
                await run.weights.publish(version=step + 1)  # resharding flow
                await dock.retire(rows)  # frees slots: the next prompts are born fresh
                await run.after_step(step, metrics)  # checkpoint, evaluate, sinks
        await dock.close()


async def admit(prompts: Prompts, dock: Dock) -> None:
    """Prompts enter when slots are free: this is back-pressure and the staleness bound in one."""
    with suppress(DockClosed):  # between the two: the groups stay with the prompts
        while slots := await dock.slots():
            groups = prompts.next_groups(slots)
            if groups is None:
                return await dock.end_of_prompts()
            await dock.admit(groups)
            prompts.admitted()


async def pump(dock: Dock, stage: Stage, role: Role) -> None:
    """Hand ready rows to the stage's workers; acknowledge, or drop what they dropped."""
    async for rows in dock.stream(stage):
        try:
            async with role.lease():  # colocated roles hand the device over here
                outcome = await role.run(stage, rows)  # the worker fetches, computes and writes back
            await dock.finish(rows, outcome)
        except WarehouseLost:  # its rows are made anew: this stage gets them again
            await dock.give_back(rows)
