"""The engine: limits, stops, independence from the batch, a full cache, weights, abort, deadlines."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests import rollout_cases as cases

from docklands.core.fields import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from docklands.core.protocols import Generation, Request, Sampling
from docklands.errors import MissingWeight, RolloutError, ShapeMismatch
from docklands.rollout import NativeEngine, sample_seed
from docklands.rollout.queue import WorkQueue


def key(generation: Generation) -> tuple[object, ...]:
    return generation.token_ids, generation.logprobs, generation.finish


def test_limits_stops_and_finish_reasons() -> None:
    engine = cases.engine(cases.model())
    stops = tuple(range(2, 24))  # about half of the vocabulary: a stop comes soon
    requests = cases.groups(3, 8, Sampling(20, min_tokens=5, stop_ids=stops))
    found = engine.generate(requests)
    for generation in found:
        ids = list(generation.token_ids)
        assert 6 <= len(ids) <= 20 or (len(ids) > 5 and generation.finish == FINISH_STOP)
        assert not set(ids[:5]) & set(stops)
        assert not set(ids[:-1]) & set(stops)
        assert (generation.finish == FINISH_STOP) == (ids[-1] in stops)
        assert len(ids) == len(generation.logprobs) == len(generation.versions)
    assert {generation.finish for generation in found} == {FINISH_STOP}
    assert {g.finish for g in engine.generate(cases.groups(2, 2, Sampling(7)))} == {FINISH_LENGTH}
    assert [g.request_id for g in found] == [r.request_id for r in requests]


def test_pitfall_11_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    """The longest row of a batch that ended by itself is not "truncated"; one cut at the same length is."""
    engine = cases.engine(cases.model())
    free = Request(cases.prompt(6), Sampling(12), sample_seed(1, 0, 0, 0), 0)
    ids = list(engine.generate([free])[0].token_ids)
    at = next(i for i in range(2, 12) if ids[i] not in ids[:i])
    stop = Request(free.prompt, Sampling(at + 1, stop_ids=(ids[at],)), free.seed, 1)
    cut = Request(free.prompt, Sampling(at + 1), free.seed, 2)
    stopped, truncated = engine.generate([stop, cut])
    assert stopped.token_ids == truncated.token_ids == ids[: at + 1]
    assert (stopped.finish, truncated.finish) == (FINISH_STOP, FINISH_LENGTH)


def test_pitfall_10_zero_tokens_asked() -> None:
    engine = cases.engine(cases.model())
    nothing = Request(cases.prompt(4), Sampling(0), 0, 5)
    some = Request(cases.prompt(4), Sampling(3), 0, 6)
    assert engine.generate([nothing]) == [Generation([], [], [], FINISH_LENGTH, 5)]
    found = engine.generate([nothing, some, nothing])
    assert [len(g.token_ids) for g in found] == [0, 3, 0]
    assert engine.generate([]) == []


def test_a_sample_is_the_same_in_any_company() -> None:
    """Alone, in its group, in a crowd, in another order, with a batch of 3: same tokens and log-prob bits."""
    source = cases.model()
    requests = cases.groups(5, 6, Sampling(25, temperature=0.9))
    crowd = [key(g) for g in cases.engine(source, max_batch=32).generate(requests)]
    order = torch.randperm(len(requests)).tolist()
    narrow = cases.engine(source, max_batch=3).generate([requests[i] for i in order])
    assert [key(g) for g in narrow] == [crowd[i] for i in order]
    for index in (0, 13, 29):
        assert key(cases.engine(source).generate([requests[index]])[0]) == crowd[index]
    assert len({tuple(k[0]) for k in crowd}) > 25  # type: ignore[arg-type]


def test_pitfall_37_one_engine_equals_four() -> None:
    source = cases.model()
    requests = cases.groups(8, 4, Sampling(30))
    one = [key(g) for g in cases.engine(source).generate(requests)]
    queue = WorkQueue(requests, 4)
    engines = [cases.engine(source, max_batch=8) for _ in range(4)]
    threads = [threading.Thread(target=engine.serve, args=(queue,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [key(g) for g in queue.results()] == one


@pytest.mark.parametrize("tokens", [96, 128, 320])
def test_a_cache_too_small_for_all_still_serves_all(tokens: int) -> None:
    """Preempted samples start over and come out the same; 96 tokens hold one sample at a time."""
    source = cases.model()
    requests = cases.groups(4, 5, Sampling(50))  # prompts up to 24 tokens: 6 pages of 16 alone
    want = [key(g) for g in cases.engine(source).generate(requests)]
    engine = cases.engine(source, kv_cache_tokens=tokens, kv_block_tokens=16)
    assert [key(g) for g in engine.generate(requests)] == want
    metrics = engine.take_metrics()
    assert metrics["rollout/kv_blocks_peak"][0] <= tokens // 16
    assert 0 < metrics["rollout/preemptions"][0] < 3 * len(requests)  # pressure, but no thrashing
    assert engine._cache is not None and engine._cache.used == 0


def test_the_prompt_of_a_group_is_computed_once() -> None:
    engine = cases.engine(cases.model(), max_batch=4)
    requests = cases.groups(3, 8, Sampling(12))  # more samples than rows: groups straddle admissions
    engine.generate(requests)
    metrics = engine.take_metrics()
    assert metrics["rollout/prefill_tokens"][0] == 3 + 10 + 17
    assert metrics["rollout/decode_tokens"][0] == 24 * 12
    assert metrics["rollout/decode_steps"][0] == 24 * 11 / 4
    assert engine.take_metrics()["rollout/decode_tokens"] == (0.0, 1.0)


def test_ragged_lengths_refill_the_batch() -> None:
    limits = [3, 40, 5, 7, 40, 2, 9, 11, 4, 30, 6, 8]
    requests = [Request(cases.prompt(5, i), Sampling(n, min_tokens=n), i, i) for i, n in enumerate(limits)]
    engine = cases.engine(cases.model(), max_batch=4)
    assert [len(g.token_ids) for g in engine.generate(requests)] == limits
    steps = engine.take_metrics()["rollout/decode_steps"][0]
    fixed = sum(max(limits[i : i + 4]) for i in range(0, 12, 4))  # batches that wait for their longest
    assert sum(limits) / 4 - 1 <= steps < 0.75 * fixed


def test_pitfall_18_new_weights_are_used_after_sleep_and_wake() -> None:
    old, new = cases.model(seed=1), cases.model(seed=2)
    engine, requests = cases.engine(old, version=4), cases.groups(2, 3, Sampling(15))
    before = engine.generate(requests)
    engine.sleep()
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate(requests)
    engine.load_weights(new.named_parameters(), 5)
    engine.wake()
    after = engine.generate(requests)
    assert {v for g in before for v in g.versions} == {4} and {v for g in after for v in g.versions} == {5}
    for request, found in zip(requests, after):
        want = cases.full_logprobs(new, request, list(found.token_ids))
        assert (want - torch.tensor(found.logprobs)).abs().max() < 1e-5
        stale = cases.full_logprobs(old, request, list(found.token_ids))
        assert (stale - torch.tensor(found.logprobs)).abs().max() > 1e-3


def test_pitfall_19_no_prompt_survives_its_weights() -> None:
    """The same prompt before and after an update: as a fresh engine; also when the update comes between admissions."""
    old, new = cases.model(seed=1), cases.model(seed=2)
    requests = cases.groups(1, 6, Sampling(9))
    fresh = [key(g) for g in cases.engine(new).generate(requests)]
    engine = cases.engine(old, max_batch=2)
    first = engine.generate(requests)
    engine.load_weights(new.named_parameters(), 1)
    assert [key(g) for g in engine.generate(requests)] == fresh
    engine.load_weights(old.named_parameters(), 2)
    assert [key(g) for g in engine.generate(requests)] == [key(g) for g in first]

    late = update_after(cases.engine(old, max_batch=2), new, steps=3)  # samples 2.. start under the new weights
    found = late.generate(requests)
    assert [key(g) for g in found[2:]] == fresh[2:]
    assert all(set(g.versions) == {9} for g in found[2:])
    assert late.take_metrics()["rollout/prefill_tokens"][0] == 2 * 3


def update_after(engine: NativeEngine, source: torch.nn.Module, steps: int) -> NativeEngine:
    """Load `source` as version 9 between two decode steps, on the engine's own thread."""
    iterate, seen = engine._iterate, []

    def counted(queue: WorkQueue) -> bool:
        if len(seen) == steps:
            engine.load_weights(source.named_parameters(), 9)
        seen.append(1)
        return iterate(queue)

    engine._iterate = counted  # type: ignore[method-assign]
    return engine


def test_every_token_says_which_weights_made_it() -> None:
    old, new = cases.model(seed=1), cases.model(seed=2)
    engine = update_after(cases.engine(old, version=8), new, steps=4)
    for found in engine.generate(cases.groups(2, 2, Sampling(12))):
        assert list(found.versions) == [8] * 5 + [9] * 7  # the prefill draws the first token


def test_weights_are_checked() -> None:
    source = cases.model()
    engine = NativeEngine(source.config, cases.engine(source)._section)
    with pytest.raises(RolloutError, match="without a complete set of weights"):
        engine.generate(cases.groups(1, 1, Sampling(2)))
    named = dict(source.named_parameters())
    gone = {name: tensor for name, tensor in named.items() if name != "layers.1.down.weight"}
    with pytest.raises(MissingWeight, match=r"1 weights did not come, first 'layers.1.down.weight'"):
        engine.load_weights(gone.items(), 1)
    with pytest.raises(MissingWeight, match="'layers.7.o.weight'"):
        engine.load_weights({**named, "layers.7.o.weight": torch.zeros(1)}.items(), 1)
    with pytest.raises(ShapeMismatch, match=r"'embed.weight' came as \(3, 48\), the generator holds \(46, 48\)"):
        engine.load_weights({"embed.weight": torch.zeros(3, 48)}.items(), 1)
    assert engine.version == -1
    with pytest.raises(RolloutError, match="complete set"):
        engine.generate(cases.groups(1, 1, Sampling(2)))
    engine.load_weights(named.items(), 3)
    assert engine.version == 3 and engine.generate(cases.groups(1, 1, Sampling(2)))


def test_tied_head_follows_the_embedding() -> None:
    """The packed head is made from the new embedding: a stale one is off by nats, silently."""
    old, new = (cases.model(cases.config("llama"), seed) for seed in (1, 2))
    engine, requests = cases.engine(old), cases.groups(1, 2, Sampling(6))
    engine.generate(requests)
    engine.load_weights([*new.named_parameters(), ("head.weight", new.head_weight)], 1)
    for request, found in zip(requests, engine.generate(requests)):
        want = cases.full_logprobs(new, request, list(found.token_ids))
        assert (want - torch.tensor(found.logprobs)).abs().max() < 1e-5


def test_abort_returns_what_there_is() -> None:
    engine = cases.engine(cases.model(), max_batch=4)
    requests = cases.groups(2, 4, Sampling(480))
    whole = cases.engine(cases.model()).generate([requests[0]])[0]
    timer = threading.Timer(0.15, engine.abort)
    timer.start()
    began = time.monotonic()
    found = engine.generate(requests)
    timer.join()
    assert time.monotonic() - began < 30
    assert {g.finish for g in found} == {FINISH_ABORT}
    assert 0 < len(found[0].token_ids) < 480
    assert list(found[0].token_ids) == list(whole.token_ids)[: len(found[0].token_ids)]
    assert [len(g.token_ids) for g in found[4:]] == [0] * 4
    assert engine.take_metrics()["rollout/aborted"][0] == 8
    engine.abort()  # nothing runs: the next call is not touched
    assert {g.finish for g in engine.generate(cases.groups(1, 2, Sampling(3)))} == {FINISH_LENGTH}


def test_pitfall_27_a_deadline_names_who_is_pending() -> None:
    engine = cases.engine(cases.model(), sample_deadline_s=0.1, max_batch=2)
    quick = Request(cases.prompt(4), Sampling(1), 1, 900)
    slow = [Request(cases.prompt(5), Sampling(480), k, 901 + k) for k in range(4)]
    began = time.monotonic()
    with pytest.raises(
        RolloutError, match=r"4 of 5 samples are not finished after 0.1 s.*\[901, 902, 903, 904\]"
    ) as caught:
        engine.generate([quick, *slow])
    assert time.monotonic() - began < 20 and "sample_deadline_s" in caught.value.hint
    assert engine._cache is not None and engine._cache.used == 0
    assert len(engine.generate([quick])) == 1  # usable afterwards


def test_one_generate_at_a_time() -> None:
    engine = cases.engine(cases.model())
    thread = threading.Thread(target=engine.generate, args=(cases.groups(1, 1, Sampling(480)),))
    thread.start()
    while engine._scheduler is None and thread.is_alive():
        time.sleep(0.001)
    with pytest.raises(RolloutError, match="generate while generating"):
        engine.generate(cases.groups(1, 1, Sampling(2)))
    with pytest.raises(RolloutError, match="sleep while generating"):
        engine.sleep()
    engine.abort()
    thread.join(30)
    assert not thread.is_alive()


def test_sleep_frees_the_cache() -> None:
    engine = cases.engine(cases.model())
    engine.generate(cases.groups(1, 2, Sampling(4)))
    assert engine._cache is not None and engine._decoder is not None
    engine.sleep()
    assert engine._cache is None and engine._decoder is None
    engine.wake()
    assert len(engine.generate(cases.groups(1, 2, Sampling(4)))) == 2
