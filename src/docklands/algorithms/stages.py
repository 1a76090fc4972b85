"""The standard stages: each calls its role's resource. Module-level functions, so that other processes can run them.

role         resource                              verb
rollout      a rollout worker                      .rollout(batch)
reward       a scorer                              .score(batch)
actor        a train engine                        .logprobs(batch)
reference    a train engine that never learns      .logprobs(batch)
critic       a train engine with a value head      .values(batch)
data         a demonstrator                        .demonstrate(batch)
advantage    the algorithm itself                  .advantage(batch), .filter_groups(batch)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from docklands.core.batch import Batch
from docklands.core.fields import (
    ADMITTED,
    COMPLETION,
    ENV_REWARD,
    FINISH_REASON,
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    PROMPT,
    PROMPT_ID,
    PROMPT_TOKENS,
    REF_LOGPROBS,
    REWARD,
    REWARD_INFO,
    ROLLOUT_LOGPROBS,
    SAMPLE_INDEX,
    TOKEN_IDS,
    VALUES,
    WEIGHT_VERSIONS,
    Field,
)
from docklands.core.graph import UPDATE, Graph
from docklands.core.stage import By, Learner, Result, Stage
from docklands.errors import GraphError

if TYPE_CHECKING:
    from docklands.algorithms.base import Algorithm

Fields = tuple[Field[Any], ...]

KEPT = Field("kept", "bool", (), "the sample's group passed the filter; what comes after the filter waits for it")


def run_rollout(worker: Any, batch: Batch) -> Batch | Result:
    return worker.rollout(batch)


def run_reward(scorer: Any, batch: Batch) -> Batch | Result:
    return scorer.score(batch)


def run_old_logprobs(engine: Any, batch: Batch) -> Batch:
    return Batch(batch.row_ids, {OLD_LOGPROBS: engine.logprobs(batch)})


def run_ref_logprobs(engine: Any, batch: Batch) -> Batch:
    return Batch(batch.row_ids, {REF_LOGPROBS: engine.logprobs(batch)})


def run_values(engine: Any, batch: Batch) -> Batch:
    return Batch(batch.row_ids, {VALUES: engine.values(batch)})


def run_demonstrate(demonstrator: Any, batch: Batch) -> Batch | Result:
    return demonstrator.demonstrate(batch)


def run_prefer(demonstrator: Any, batch: Batch) -> Batch | Result:
    return demonstrator.prefer(batch)


def run_filter_groups(algorithm: Algorithm, batch: Batch) -> Result:
    return algorithm.filter_groups(batch)


def run_advantage(algorithm: Algorithm, batch: Batch) -> Batch | Result | None:
    return algorithm.advantage(batch)


def run_update(resource: Any, batch: Batch) -> Result:
    """The loop takes this stage's rows itself, cuts them into updates and calls every learner's role."""
    raise GraphError("the update stage is not run like the others", "the loop calls Role.update for each learner")


ROLLOUT = Stage(
    "rollout",
    "rollout",
    ADMITTED,
    (TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS, WEIGHT_VERSIONS, FINISH_REASON, COMPLETION, ENV_REWARD),
    run_rollout,
)
REWARDS = Stage(
    "reward",
    "reward",
    (GROUP_ID, PROMPT, COMPLETION, FINISH_REASON, LOSS_MASK, ENV_REWARD),
    (REWARD, REWARD_INFO),
    run_reward,
)
FILTER = Stage("filter_groups", "advantage", (GROUP_ID, REWARD), (KEPT,), run_filter_groups)
DEMONSTRATE = Stage("demonstrate", "data", (PROMPT_ID, PROMPT_TOKENS, PROMPT), (TOKEN_IDS, LOSS_MASK), run_demonstrate)
PREFER = Stage("prefer", "data", (PROMPT_ID, SAMPLE_INDEX, PROMPT_TOKENS, PROMPT), (TOKEN_IDS, LOSS_MASK), run_prefer)

FORWARD: Fields = (GROUP_ID, TOKEN_IDS, LOSS_MASK)
"""What an engine's forward pass reads; GROUP_ID lets it compute a group's prompt once."""


def old_logprobs(gate: Fields) -> Stage:
    """pi_old by the trainer. `gate`: (KEPT,) behind a filter, so that no work is spent on dropped groups."""
    return Stage("old_logprobs", "actor", (*FORWARD, *gate), (OLD_LOGPROBS,), run_old_logprobs)


def ref_logprobs(gate: Fields) -> Stage:
    return Stage("ref_logprobs", "reference", (*FORWARD, *gate), (REF_LOGPROBS,), run_ref_logprobs)


def values(gate: Fields) -> Stage:
    return Stage("values", "critic", (*FORWARD, *gate), (VALUES,), run_values)


def advantage(reads: Fields, writes: Fields, by: By) -> Stage:
    return Stage("advantage", "advantage", reads, writes, run_advantage, by)


def with_routes(graph: Graph, column: Field[Any], replay: bool = True) -> Graph:
    """The graph in which rollout writes the router choices and, with `replay`, the actor's forward passes read them:
    log-probs and update. A graph without rollout stays as it is. Reference and critic have routers of their own, which
    choose for themselves.
    """
    writer = graph.writer_of(TOKEN_IDS)
    if writer is None or writer.role != "rollout":
        return graph

    def more(stage: Stage) -> Stage:
        if stage is writer:
            return replace(stage, writes=(*stage.writes, column))
        passes = stage.name == UPDATE or (stage.role == "actor" and {TOKEN_IDS, LOSS_MASK} <= set(stage.reads))
        return replaced(stage) if passes else stage

    def replaced(reader: Any) -> Any:
        return replace(reader, reads=(*reader.reads, column)) if replay else reader

    learners = [replaced(learner) if learner.role == "actor" else learner for learner in graph.learners]
    return Graph(tuple(map(more, graph.stages)), tuple(learners), graph.sources)


def update(learners: tuple[Learner, ...]) -> Stage:
    """Reads what the learners read, exactly one step's groups at a time."""
    reads = tuple(dict.fromkeys(column for learner in learners for column in learner.reads))
    return Stage(UPDATE, learners[0].role, reads, (), run_update, by="step")
