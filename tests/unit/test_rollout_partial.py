"""Partial rollouts: an interrupted sample is the uninterrupted one; groups wait whole; nothing is cut or doubled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import rollout_cases as cases

from docklands.config.schema import EnvSection, RolloutSection
from docklands.core.batch import Batch
from docklands.core.fields import (
    COMPLETION,
    FINISH_REASON,
    GROUP_ID,
    LOSS_MASK,
    PROMPT_TOKENS,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
    WEIGHT_VERSIONS,
)
from docklands.envs import build_env_factory
from docklands.errors import ConfigError
from docklands.rollout import NativeEngine, RolloutWorker
from docklands.rollout.keeping import KeepingWorker
from docklands.rollout.partial import Unfinished, check_partial
from docklands.rollout.trajectory import Episode


def worker(env: Any = None, **section: Any) -> RolloutWorker:
    settings = RolloutSection(**{"max_batch": 16, "max_response_tokens": 40, **section})
    source = cases.model()
    found = RolloutWorker([NativeEngine(source.config, settings)], cases.tokenizer(), env, settings, 7)
    found.load_weights(source.named_parameters(), 3)
    return found


def keeper(**section: Any) -> KeepingWorker:
    """As `worker`, of one whose samples keep their KV cache."""
    settings = RolloutSection(**{"max_batch": 16, "max_response_tokens": 40, "partial_kv": "keep", **section})
    source = cases.model()
    engine = NativeEngine(source.config, settings)
    sizes = {"longest_prompt": 24, "vocabulary": source.config.vocab_size}
    found = KeepingWorker([engine], cases.tokenizer(), None, settings, 7, None, **sizes)
    found.load_weights(source.named_parameters(), 3)
    return found


def rows(prompts: int, samples: int) -> Batch:
    """Prompts of different lengths."""
    texts = [f"{7 * p}+{p}{'=' * (p + 1)}" for p in range(prompts)]
    return cases.admitted(texts, samples, [{"prompt": text, "answer": str(8 * p)} for p, text in enumerate(texts)])


def visits(found: RolloutWorker, batch: Batch, between: Any = lambda visit: None) -> tuple[dict[int, dict], list[int]]:
    """Visit until nothing is left; (row -> its written columns, rows that each visit left for later)."""
    samples: dict[int, dict] = {}
    left, rest = batch, []
    for visit in range(60):
        result = found.rollout(left)
        written = result.batch
        assert written is not None
        ids = written.row_ids.tolist()
        assert not set(ids) & set(result.later) and set(ids) | set(result.later) == set(left.row_ids.tolist())
        assert not set(ids) & samples.keys(), "a sample came twice"
        for i, row in enumerate(ids):
            samples[row] = {field.name: written[field][i] for field in written.fields}
        rest.append(len(result.later))
        if not result.later:
            return samples, rest
        left = batch.by_id(np.array(result.later))
        between(visit)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_an_interrupted_sample_is_the_uninterrupted_one(tokens: int) -> None:
    batch = rows(5, 3)
    whole, _ = visits(worker(), batch)
    parts, rest = visits(worker(partial_tokens=tokens), batch)
    assert len(rest) > 40 // tokens - 1 and rest[0] > 0
    assert parts.keys() == whole.keys()
    lengths = {len(sample[TOKEN_IDS.name]) for sample in whole.values()}
    assert len(lengths) > 3, "ragged, or the test shows little"
    for row, sample in whole.items():
        for field in (TOKEN_IDS, LOSS_MASK, WEIGHT_VERSIONS):
            assert torch.equal(torch.as_tensor(sample[field.name]), torch.as_tensor(parts[row][field.name])), field
        assert sample[COMPLETION.name] == parts[row][COMPLETION.name]
        assert int(sample[FINISH_REASON.name]) == int(parts[row][FINISH_REASON.name])
        assert torch.allclose(sample[ROLLOUT_LOGPROBS.name], parts[row][ROLLOUT_LOGPROBS.name], atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_a_sample_that_keeps_its_cache_is_the_uninterrupted_one_and_is_computed_once(tokens: int) -> None:
    """With the same weights; an evaluation in between changes nothing, nor does an abort but for the work."""
    batch = rows(5, 3)
    whole, _ = visits(worker(), batch)
    found, prefilled = keeper(partial_tokens=tokens, max_batch=8), []

    def between(visit: int) -> None:
        if visit == 0:
            found.rollout(rows(2, 2), sampling=found.sampling)
            found._engine.take_metrics()

    played = found.rollout

    def counted(*args: Any, **more: Any) -> Any:
        result = played(*args, **more)
        prefilled.append(result.metrics["rollout/prefill_tokens"][0])
        return result

    found.rollout = counted  # type: ignore[method-assign]
    parts, rest = visits(found, batch, between)
    assert parts.keys() == whole.keys() and len(rest) > 2
    for row, sample in whole.items():
        for field in (TOKEN_IDS, LOSS_MASK, WEIGHT_VERSIONS):
            assert torch.equal(torch.as_tensor(sample[field.name]), torch.as_tensor(parts[row][field.name])), field
        assert torch.allclose(sample[ROLLOUT_LOGPROBS.name], parts[row][ROLLOUT_LOGPROBS.name], atol=1e-5)
    again = sum(len(tokens) for tokens in {tuple(row.tolist()) for row in batch[PROMPT_TOKENS]})
    assert sum(prefilled[:1] + prefilled[2:]) <= again, "what was sampled is never computed again"


def test_what_ends_in_a_visit_that_did_not_ask_for_it_is_kept_until_it_is_asked_for() -> None:
    """A lease may have some of the rows under way; the engine decodes them all."""
    batch = rows(6, 2)
    whole, _ = visits(worker(), batch)
    found, parts = keeper(partial_tokens=5), {}

    def ask(row_ids: np.ndarray) -> float:
        result = found.rollout(batch.by_id(row_ids))
        assert result.batch is not None and set(result.batch.row_ids.tolist()) <= set(row_ids.tolist())
        parts.update({row: result.batch.by_id([row])[TOKEN_IDS][0] for row in result.batch.row_ids.tolist()})
        return result.metrics["rollout/prefill_tokens"][0]

    ask(batch.row_ids)
    first, second = batch.row_ids[:6], batch.row_ids[6:]
    while any(row not in parts for row in first.tolist()):
        assert not ask(np.array([row for row in first.tolist() if row not in parts]))
    assert not any(row in parts for row in second.tolist()) or len(parts) < len(batch)
    while any(row not in parts for row in second.tolist()):
        assert not ask(np.array([row for row in second.tolist() if row not in parts]))
    assert all(torch.equal(parts[row], whole[row][TOKEN_IDS.name]) for row in whole)


def test_a_sample_that_keeps_its_cache_goes_on_under_new_weights_beside_new_ones() -> None:
    batch = rows(3, 2)
    first, second = batch.select(np.arange(4)), batch.select(np.arange(4, 6))
    found = keeper(partial_tokens=10, min_response_tokens=36, max_response_tokens=36)
    assert found.rollout(first).later == first.row_ids.tolist()
    other = cases.model(seed=50)
    found.load_weights(other.named_parameters(), 4)
    written = {}
    for _ in range(4):
        result = found.rollout(
            batch.select(np.array([row not in written for row in batch.row_ids.tolist()]).nonzero()[0])
        )
        assert result.batch is not None
        written |= {row: result.batch[WEIGHT_VERSIONS][i] for i, row in enumerate(result.batch.row_ids.tolist())}
    assert written.keys() == set(batch.row_ids.tolist())
    for row, versions in written.items():
        made = versions[versions >= 0].tolist()
        assert made == ([4] * 36 if row in second.row_ids else [3] * 11 + [4] * 25), row


def test_an_abort_of_samples_that_keep_their_cache_leaves_nothing_behind() -> None:
    batch = rows(2, 2)
    found = keeper(partial_tokens=3)
    assert found.rollout(batch).later
    decode = found._engine._decode
    found._engine._decode = lambda scheduler: (found.abort(), decode(scheduler))[1]  # type: ignore[method-assign]
    assert found.rollout(batch).later == batch.row_ids.tolist()
    assert not any(row in found._live for row in batch.row_ids.tolist())


def test_groups_come_whole() -> None:
    batch = rows(5, 3)
    found = worker(partial_tokens=9)
    result = found.rollout(batch)
    assert result.batch is not None and result.later
    groups = {int(g) for g in batch.by_id(np.array(result.later))[GROUP_ID]}
    done = {int(g) for g in batch.by_id(result.batch.row_ids)[GROUP_ID]}
    assert not groups & done
    assert len(result.later) == 3 * len(groups)
    assert result.metrics["rollout/unfinished"] == (len(result.later), 1.0)


def test_each_token_keeps_the_version_and_the_log_prob_that_it_was_sampled_with() -> None:
    """Weights change between visits: the parts before and after are each policy's own."""
    batch = rows(2, 2)
    found = worker(partial_tokens=10, min_response_tokens=40)
    models = {3: cases.model()}

    def publish(visit: int) -> None:
        models[4 + visit] = cases.model(seed=50 + visit)
        found.load_weights(models[4 + visit].named_parameters(), 4 + visit)

    samples, rest = visits(found, batch, publish)
    assert rest == [4, 4, 4, 0]
    for sample in samples.values():
        mask = sample[LOSS_MASK.name]
        versions = sample[WEIGHT_VERSIONS.name][mask]
        assert versions.tolist() == [3] * 10 + [4] * 10 + [5] * 10 + [6] * 10
        tokens, start = sample[TOKEN_IDS.name].tolist(), int((~mask).sum())
        for version, source in models.items():
            logits_TV = cases.full_logits(source, tokens)
            table = torch.log_softmax(logits_TV, -1)[start - 1 : -1]
            expected = table.gather(1, torch.tensor(tokens[start:])[:, None]).squeeze(1)
            mine = versions == version
            assert torch.allclose(sample[ROLLOUT_LOGPROBS.name][mask][mine], expected[mine], atol=1e-4)


def test_what_waits_survives_a_checkpoint() -> None:
    batch = rows(4, 2)
    whole, _ = visits(worker(), batch)
    first = worker(partial_tokens=6)
    result = first.rollout(batch)
    assert result.batch is not None and result.later
    second = worker(partial_tokens=6)
    second.load_state_dict(first.state_dict())
    drawn = []
    generate = second._engines[0].generate
    second._engines[0].generate = lambda requests: drawn.extend(r.drawn for r in requests) or generate(requests)  # type: ignore[method-assign]
    rest, _ = visits(second, batch.by_id(np.array(result.later)))
    assert drawn[: len(result.later) // 2] and max(drawn) >= 6, "it went on, and did not begin anew"
    for row, sample in rest.items():
        assert torch.equal(sample[TOKEN_IDS.name], whole[row][TOKEN_IDS.name])


def test_a_checkpoint_does_not_move_with_the_next_visit() -> None:
    """Its file is written later, beside a visit: it holds what the last visit left, also of samples under way."""
    batch = rows(5, 3)
    whole, _ = visits(worker(), batch)
    first = worker(partial_tokens=6)
    left = batch.by_id(np.array(first.rollout(batch).later))
    engine, states = first._engines[0], [first.state_dict()]
    decode = engine._decode

    def seen(scheduler: Any) -> Any:
        if len(states) < 3:
            states.append(first.state_dict())
        return decode(scheduler)

    engine._decode = seen  # type: ignore[method-assign]
    first.rollout(left)
    assert len(states) == 3
    for state in states:
        assert sorted(state["rows"]) == left.row_ids.tolist()
        assert max(len(e["tokens"]) - e["prompt_length"] for e in state["episodes"]) == 6
        second = worker(partial_tokens=6)
        second.load_state_dict(state)
        rest, _ = visits(second, left)
        for row, sample in rest.items():
            assert torch.equal(sample[TOKEN_IDS.name], whole[row][TOKEN_IDS.name]), row
    rest, _ = visits(first, left)  # the rest goes on as ever
    assert all(torch.equal(rest[row][TOKEN_IDS.name], whole[row][TOKEN_IDS.name]) for row in rest)


def test_a_group_that_an_abort_cuts_goes_on_and_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """More samples than run at once: some are paused, some cut, some not begun. Through a checkpoint's file."""
    batch = rows(1, 8)
    whole, _ = visits(worker(min_response_tokens=14, max_response_tokens=14), batch)
    first = worker(partial_tokens=5, max_batch=4, min_response_tokens=14, max_response_tokens=14)
    engine = first._engines[0]
    decode, steps = engine._decode, []

    def counted(scheduler: Any) -> Any:
        steps.append(1)
        if len(steps) == 6:
            first.abort()
        return decode(scheduler)

    engine._decode = counted  # type: ignore[method-assign]
    result = first.rollout(batch)
    assert result.batch is not None and len(result.batch) == 0 and len(result.later) == 8
    torch.save(first.state_dict(), tmp_path / "flow.pt")
    second = worker(partial_tokens=5, max_batch=4, min_response_tokens=14, max_response_tokens=14)
    second.load_state_dict(torch.load(tmp_path / "flow.pt", weights_only=True))
    lengths = {len(e.turn) for e in second._unfinished._waiting.values()}
    assert {5} < lengths, lengths
    rest, _ = visits(second, batch)
    for row, sample in rest.items():
        assert torch.equal(sample[TOKEN_IDS.name], whole[row][TOKEN_IDS.name])
        assert int(sample[FINISH_REASON.name]) == int(whole[row][FINISH_REASON.name])


def test_router_choices_and_those_of_several_replicas_survive_a_checkpoint(tmp_path: Path) -> None:
    replicas = []
    for row in (3, 4):
        waiting = Unfinished()
        episode = Episode([1, 2, 3], 1, 7, row, routes=np.full((3, 2, 2), row, np.int16))
        waiting.keep([row], [episode])
        replicas.append(waiting.state_dict())
    torch.save({"replicas": replicas}, tmp_path / "flow.pt")
    merged = Unfinished()
    merged.load_state_dict(torch.load(tmp_path / "flow.pt", weights_only=True))
    found = [merged.resume(3), merged.resume(4)]
    assert [e and e.routes is not None and int(e.routes[0, 0, 0]) for e in found] == [3, 4]
    assert [e and e.tokens for e in found] == [[1, 2, 3]] * 2 and merged.resume(5) is None


def test_turns_of_an_environment_are_interrupted_too() -> None:
    env = build_env_factory(EnvSection(name="calculator", max_turns=3))
    batch = rows(3, 2)
    whole, _ = visits(worker(env), batch)
    parts, rest = visits(worker(env, partial_tokens=5), batch)
    assert rest[0] > 0
    for row, sample in whole.items():
        for field in (TOKEN_IDS, LOSS_MASK):
            assert torch.equal(sample[field.name], parts[row][field.name])
        assert sample[COMPLETION.name] == parts[row][COMPLETION.name]


def test_evaluation_is_never_interrupted() -> None:
    found = worker(partial_tokens=2)
    result = found.rollout(rows(2, 2), sampling=found.sampling)
    assert result.batch is not None and len(result.batch) == 4 and not result.later


def test_it_needs_a_staleness_bound() -> None:
    with pytest.raises(ConfigError, match="partial_tokens is 64, but with dock.max_staleness 0"):
        check_partial(RolloutSection(partial_tokens=64), 0)
    check_partial(RolloutSection(partial_tokens=64), 1)
    check_partial(RolloutSection(partial_tokens=64, partial_kv="keep"), 1)
    for tokens, alone in ((0, True), (64, False)):
        with pytest.raises(ConfigError, match="partial_kv is keep, which needs"):
            check_partial(RolloutSection(partial_tokens=tokens, partial_kv="keep"), 1, alone)
    check_partial(RolloutSection(), 0)
