"""Generation over the ranks of a layout: the tokens of one process, whatever is split; and what happens when a lane has
less to do, is aborted, is late, fails, or has lost a peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from docklands.config.layouts import GenerationLayoutSection
from docklands.config.schema import RolloutSection
from docklands.core.fields import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from docklands.core.protocols import Generation, Request, Sampling
from docklands.errors import DocklandsError, MissingWeight, ShapeMismatch
from docklands.models import ModelConfig, load
from docklands.models.sharded import load_sharded
from docklands.parallel import fsdp
from docklands.parallel.layout import Layout
from docklands.parallel.mesh import Mesh
from docklands.rollout import NativeEngine
from docklands.rollout.mesh import MeshEngine, generation_layout
from tests import rollout_cases
from tests.distributed.cases import MODELS
from tests.distributed.pool import Pool

SECTION = {"max_batch": 2, "kv_block_tokens": 16}


def layout_of(name: str, **degrees: int) -> Layout:
    return generation_layout(GenerationLayoutSection(**degrees), ModelConfig.from_hf(MODELS[name]))


def engine_of(path: Path, layout: Layout, version: int = 7, timeout_s: float = 60.0, **section: Any) -> MeshEngine:
    """This rank's engine, with the weights of a directory."""
    mesh = Mesh(layout, timeout_s=timeout_s)
    model = load_sharded(path / "policy", mesh)
    engine = MeshEngine(model.config, RolloutSection(**{**SECTION, **section}), mesh)
    engine.hold({name: fsdp.local(p).detach() for name, p in model.parameters().items()}, version)
    return engine


def asked(lane: int = 0, lanes: int = 1, **sampling: Any) -> list[Request]:
    """Five prompts of different lengths, two samples each; of one lane those of every `lanes`-th prompt."""
    how = Sampling(**{"max_tokens": 9, "min_tokens": 2, "stop_ids": tuple(range(40, 45)), **sampling})
    return [r for r in rollout_cases.groups(5, 2, how) if r.request_id // 2 % lanes == lane]


def alike(found: list[Generation], expected: list[Generation]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine.request_id, mine.finish) == (other.request_id, other.finish)
        assert list(mine.token_ids) == list(other.token_ids)
        assert np.abs(np.array(mine.logprobs) - np.array(other.logprobs)).max(initial=0.0) < 1e-5
        assert list(mine.versions) == list(other.versions)
        if other.routes is not None:
            assert mine.routes is not None and np.array_equal(mine.routes, other.routes)


@cache
def alone(path: Path, routes: bool) -> list[Generation]:
    """The engine in one process, and its log-probs against the plain forward pass."""
    model = load(path / "policy")
    engine = NativeEngine(model.config, RolloutSection(**SECTION, record_routes=routes))  # type: ignore[arg-type]
    engine.load_weights(model.named_parameters(), 7)
    requests = asked()
    found = engine.generate(requests)
    for request, generation in zip(requests, found):
        want = rollout_cases.full_logprobs(model, request, list(generation.token_ids))
        assert (want - torch.tensor(generation.logprobs)).abs().max() < 1e-5
    return found


@dataclass
class Said:
    """A rank's answer: samples of two rounds, metrics, the probe's log-probs."""

    first: list[Generation]
    second: list[Generation]
    metrics: dict[str, tuple[float, float]]
    probe: torch.Tensor | None


def in_rounds(path: Path, layout: Layout, routes: bool) -> Said:
    """A case: all prompts over the lanes, then more on the first lane alone, as a multi-turn episode has it."""
    engine = engine_of(path, layout, record_routes=routes)
    lane = engine.mesh.coords["dp"]

    def work() -> tuple[list[Generation], list[Generation]]:
        first = engine.generate(asked(lane, layout.dp))
        return first, engine.generate(asked(0, 5)) if lane == 0 else []

    first, second = engine.together(work if engine.is_leader else None) or ([], [])
    assert engine.together((lambda: 5) if engine.is_leader else None) in (5, None)  # a session without samples
    return Said(first, second, engine.take_metrics(), engine.score([[5, 9, 3, 1, 44], [17, 2, 60]], 0.7))


CASES = [
    ("qwen3_tied", {"dp": 4}),
    ("qwen2_two_kv_heads", {"tp": 2, "dp": 2}),
    ("qwen2_two_kv_heads", {"tp": 4}),
    ("qwen3_moe", {"ep": 4}),
    ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2}),
    ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}),
    ("deepseek", {"tp": 4, "ep": 2}),
    ("deepseek", {"tp": 2, "dp": 2, "ep": 4}),
    ("deepseek", {"ep": 4}),
]


@pytest.mark.parametrize(("name", "degrees"), CASES, ids=str)
def test_the_tokens_of_one_process(name: str, degrees: dict[str, int], models: Path, pool: Pool) -> None:
    layout, routes = layout_of(name, **degrees), name != "qwen2_two_kv_heads"
    routes = routes and name != "qwen3_tied"
    said = pool.run(4, in_rounds, models / name, layout, routes)
    leaders = said[:: layout.tp]
    expected = alone(models / name, routes)
    alike(sorted((g for one in leaders for g in one.first), key=lambda g: g.request_id), expected)
    alike(leaders[0].second, expected[:2])
    assert {g.finish for g in expected} == {FINISH_STOP, FINISH_LENGTH}
    total = sum(len(g.token_ids) for g in (*expected, *expected[:2]))
    assert sum(one.metrics["rollout/decode_tokens"][0] for one in leaders) == total
    ids = [[5, 9, 3, 1, 44], [17, 2, 60]]
    plain = load(models / name / "policy")
    tables = [torch.log_softmax(rollout_cases.full_logits(plain, i)[:-1] / 0.7, -1) for i in ids]
    want = [t.gather(1, torch.tensor(i)[1:, None]).squeeze(1) for t, i in zip(tables, ids)]
    for rank, one in enumerate(said):
        assert (one.probe is None) == (rank % layout.tp > 0)
        if one.probe is not None:
            assert (one.probe - torch.cat([torch.zeros(1), want[0], torch.zeros(1), want[1]])).abs().max() < 1e-5


def during(engine: MeshEngine, step: int, action: Any) -> None:
    """Do something between two steps."""
    iterate, seen = engine._iterate, []

    def counted(queue: Any) -> bool:
        if len(seen) == step:
            action()
        seen.append(1)
        return iterate(queue)

    engine._iterate = counted  # type: ignore[method-assign]


def troubled(path: Path, layout: Layout, trouble: str) -> tuple[list[Generation], str, list[Generation]]:
    """A case: trouble in the first lane, on its last rank where that can be; then a session as usual."""
    engine = engine_of(path, layout, sample_deadline_s=600.0, max_batch=4)
    mesh, lane = engine.mesh, engine.mesh.coords["dp"]
    if lane == 0 and trouble == "abort" and mesh.coords["tp"] == layout.tp - 1:
        during(engine, 5, engine.abort)
    if lane == 0 and trouble == "late":
        during(engine, 5, lambda: setattr(engine, "_deadline", 0.0))
    if lane == 0 and trouble == "nan":
        good = dict(engine._held)
        engine.hold({**good, "final_norm.weight": good["final_norm.weight"] * torch.nan}, 7)
    requests = asked(lane, layout.dp, max_tokens=16, min_tokens=16)
    if lane == 0 and trouble == "impossible":
        requests[0] = Request((5, 999), requests[0].sampling, 1, 77)
    error = ""
    try:
        found = engine.together((lambda: engine.generate(requests)) if engine.is_leader else None) or []
    except DocklandsError as failure:
        found, error = [], f"{type(failure).__name__}: {failure.message}"
    if trouble == "nan" and lane == 0:
        engine.hold(good, 7)
    if trouble == "late":
        engine = engine_of(path, layout)
    later = engine.together((lambda: engine.generate(asked(lane, layout.dp))) if engine.is_leader else None) or []
    dist.barrier()
    return found, error, later


@pytest.mark.parametrize("trouble", ["abort", "late", "nan", "impossible"])
def test_trouble_in_one_lane_leaves_the_others_alone(trouble: str, models: Path, pool: Pool) -> None:
    """All lanes share experts: they go on in step, and the next session is as if nothing had been."""
    layout = layout_of("qwen3_moe", tp=2, dp=2, ep=4)
    said = pool.run(4, troubled, models / "qwen3_moe", layout, trouble)[:: layout.tp]
    for found, error, _ in said[1:]:
        assert error == "" and all(len(g.token_ids) == 16 for g in found)
    found, error, _ = said[0]
    if trouble == "abort":
        assert error == "" and {g.finish for g in found} == {FINISH_ABORT}
        assert 0 < len(found[0].token_ids) < 16
    else:
        begins = {
            "late": "RolloutError: 6 of 6 samples are not finished after 600 s; pending request ids: [0, 1, 4, ",
            "nan": "NonFinite: logits of ",
            "impossible": "RolloutError: request 77: the prompt has token ids [999] outside the vocabulary of 61",
        }[trouble]
        assert error.startswith(begins), error
    later = sorted((g for _, _, found in said for g in found), key=lambda g: g.request_id)
    alike(later, alone(models / "qwen3_moe", False))


def of_two_versions(path: Path, layout: Layout) -> str:
    """A case: rank 3 holds another version than the others; and what no engine takes."""
    engine = engine_of(path, layout)
    held, version = dict(engine._held), 7 + (dist.get_rank() == 3)
    with pytest.raises(MissingWeight, match="weight 'embed.weight' did not come to the generator on rank"):
        engine.hold({}, version)
    with pytest.raises(ShapeMismatch, match=r"came as \(3, 3\), the generator on rank \d holds \(40,\)"):
        engine.hold({**held, "final_norm.weight": torch.zeros(3, 3)}, version)
    engine.hold(held, version)
    try:
        engine.together((lambda: engine.generate(asked())) if engine.is_leader else None)
    except DocklandsError as error:
        return error.message
    return ""


def test_ranks_of_one_generator_hold_one_version(models: Path, pool: Pool) -> None:
    layout = layout_of("qwen3_moe", ep=4)
    said = pool.run(4, of_two_versions, models / "qwen3_moe", layout)
    assert said == ["ranks of one generator hold the weight versions [7, 8]"] * 4


def without_a_peer(path: Path, layout: Layout) -> str:
    """A case: rank 1 takes no part."""
    engine = engine_of(path, layout, timeout_s=1.0)
    said = ""
    if dist.get_rank() == 0:
        try:
            engine.together(lambda: engine.generate(asked()))
        except DocklandsError as error:
            said = error.message
    dist.barrier()
    return said


def test_pitfall_31_a_silent_rank_ends_the_session_with_its_name(models: Path, pool: Pool) -> None:
    said = pool.run(2, without_a_peer, models / "qwen3_moe", layout_of("qwen3_moe", tp=2))[0]
    assert said.startswith("generation on rank 0, together with processes [0, 1], failed: ")
