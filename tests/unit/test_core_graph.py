"""Graph: every way in which it can fail to hold together, and how it prints itself."""

from __future__ import annotations

import dataclasses
import json

import pytest

from docklands.core.fields import (
    ADVANTAGE,
    GROUP_ID,
    LOSS_MASK,
    PROMPT_TOKENS,
    REF_LOGPROBS,
    REWARD,
    TOKEN_IDS,
    Field,
)
from docklands.core.graph import Graph, rows_text
from docklands.core.stage import Learner, Stage
from docklands.errors import ConfigError, GraphError


def nothing(*_: object) -> None:
    return None


def stage(name: str, reads: tuple[Field, ...], writes: tuple[Field, ...] = (), role: str = "") -> Stage:
    return Stage(name, role or name, reads, writes, nothing)


ROLLOUT = stage("rollout", (PROMPT_TOKENS,), (TOKEN_IDS, LOSS_MASK))
SCORE = stage("reward", (TOKEN_IDS,), (REWARD,))
ADVANCE = stage("advantage", (REWARD, GROUP_ID), (ADVANTAGE,))
UPDATE = stage("update", (TOKEN_IDS, LOSS_MASK, ADVANTAGE), role="actor")
ACTOR = Learner("actor", "actor", (TOKEN_IDS, LOSS_MASK, ADVANTAGE), nothing)  # type: ignore[arg-type]
STAGES = (ROLLOUT, SCORE, ADVANCE, UPDATE)


def test_a_sound_graph() -> None:
    graph = Graph(STAGES, (ACTOR,))
    assert graph["reward"] is SCORE
    assert graph.upstream_of("update") == (ROLLOUT, SCORE, ADVANCE)
    assert graph.upstream_of("rollout") == ()
    assert graph.writer_of(REWARD) is SCORE and graph.writer_of(PROMPT_TOKENS) is None
    assert graph.roles == ("rollout", "reward", "advantage", "actor")
    assert graph.fields[-4:] == (TOKEN_IDS, LOSS_MASK, REWARD, ADVANTAGE)
    assert ("prompts", "rollout", ("prompt_tokens",)) in graph.edges()
    assert ("rollout", "update", ("token_ids", "loss_mask")) in graph.edges()
    assert ("prompts", "advantage", ("group_id",)) in graph.edges()


def test_it_prints_itself() -> None:
    graph = Graph(STAGES, (ACTOR,))
    text = graph.to_text()
    assert "@reward" in text and "weights of actor" in text and "-> advantage" in text
    mermaid = graph.to_mermaid()
    assert mermaid.startswith("flowchart LR") and "reward -->|reward| advantage" in mermaid
    assert "update -.->|weights v+1| rollout" in mermaid
    data = json.loads(json.dumps(graph.to_dict()))
    assert [s["name"] for s in data["stages"]] == ["rollout", "reward", "advantage", "update"]
    assert data["learners"] == ["actor"]


def without(name: str) -> tuple[Stage, ...]:
    return tuple(s for s in STAGES if s.name != name)


WRONG = {
    "equal names": ((ROLLOUT, ROLLOUT, UPDATE), (ACTOR,), "not unique"),
    "no stage": ((), (ACTOR,), "the last stage must be 'update'"),
    "no update": (without("update"), (ACTOR,), "the last stage must be 'update'"),
    "update not last": ((UPDATE, ROLLOUT), (ACTOR,), "the last stage must be 'update'"),
    "nobody writes": (without("reward"), (ACTOR,), "reads 'reward', which nothing earlier writes .*no stage writes it"),
    "written later": ((ROLLOUT, ADVANCE, SCORE, UPDATE), (ACTOR,), "'reward' writes it, but later"),
    "two writers": (
        (*STAGES[:2], stage("again", (TOKEN_IDS,), (REWARD,)), *STAGES[2:]),
        (ACTOR,),
        "'reward' is written by both 'reward' and 'again'",
    ),
    "writes a source": (
        (stage("rename", (), (GROUP_ID,)), *STAGES),
        (ACTOR,),
        "written by both 'prompts' and 'rename'",
    ),
    "reads its own": (
        (ROLLOUT, stage("loop", (REWARD,), (REWARD,)), ADVANCE, UPDATE),
        (ACTOR,),
        "'loop' reads 'reward', which nothing earlier writes",
    ),
    "no learner": (STAGES, (), "no learner"),
    "learner reads more": (
        STAGES,
        (dataclasses.replace(ACTOR, reads=(REWARD,)),),
        "learner 'actor' reads 'reward', which 'update' does not read",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_hold_together(case: str) -> None:
    stages, learners, message = WRONG[case]
    with pytest.raises(GraphError, match=message) as caught:
        Graph(stages, learners)
    assert isinstance(caught.value, ConfigError) and caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_pitfall_15_a_stage_that_nothing_reads() -> None:
    """A reference model that nobody uses is refused: the stage is named, and what to change."""
    reference = stage("ref_logprobs", (TOKEN_IDS,), (REF_LOGPROBS,), role="reference")
    with pytest.raises(GraphError, match=r"nothing reads what stage 'ref_logprobs' writes \(ref_logprobs\)") as caught:
        Graph((ROLLOUT, SCORE, reference, ADVANCE, UPDATE), (ACTOR,))
    assert "config value that asked for it" in caught.value.hint


def test_pitfall_15_a_column_that_no_learner_reads() -> None:
    """The update stage may not ask for a reference model's log-probs that no loss uses."""
    reference = stage("ref_logprobs", (TOKEN_IDS,), (REF_LOGPROBS,), role="reference")
    update = dataclasses.replace(UPDATE, reads=(*UPDATE.reads, REF_LOGPROBS))
    with pytest.raises(GraphError, match="'update' reads ref_logprobs, which no learner reads"):
        Graph((ROLLOUT, SCORE, reference, ADVANCE, update), (ACTOR,))


def test_unknown_stage_has_a_near_match() -> None:
    graph = Graph(STAGES, (ACTOR,))
    with pytest.raises(GraphError, match="no stage 'rolout'.*did you mean 'rollout'"):
        graph["rolout"]
    with pytest.raises(GraphError, match="stages: rollout, reward"):
        graph["zzz"]


def test_fields_refuse_what_has_no_meaning() -> None:
    with pytest.raises(TypeError, match="dtype 'float31'"):
        Field("x", "float31")
    with pytest.raises(TypeError, match="json column"):
        Field("x", "json", ("T",))
    with pytest.raises(TypeError, match="only the first"):
        Field("x", "int32", (3, "T"))
    with pytest.raises(TypeError, match="'T', '\\*' or a size"):
        Field("x", "int32", ("B",))
    routes = Field("routes", "int16", ("T", 24, 8))
    assert routes.is_token and routes.is_ragged and routes.inner_shape == (24, 8)
    assert repr(routes) == "routes:int16[T,24,8]"
    assert Field("m", "float32", (2, 3)).inner_shape == (2, 3) and not Field("m", "float32", (2, 3)).is_ragged


def test_rows_text_is_short() -> None:
    assert rows_text([3, 1]) == "3, 1"
    assert rows_text(range(10), most=2) == "0, 1, ... (10 in all)"
