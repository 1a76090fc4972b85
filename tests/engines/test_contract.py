"""What every generation engine promises, asked of each: the native one everywhere, vLLM where it is installed.

`make test` asks the native engine, `make test-vllm` both, in an environment of its own. Engines are made once per model
and take weights at the start of each test, as in a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests import rollout_cases as cases

from docklands.config.schema import RolloutSection
from docklands.core.fields import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from docklands.core.protocols import Generation, Request, Sampling
from docklands.errors import MissingWeight, RolloutError, ShapeMismatch
from docklands.models import CausalLM
from docklands.rollout import NativeEngine, sample_seed

KINDS = ("native", "vllm") if find_spec("vllm") else ("native",)
SHAPES = {
    "untied": cases.config("qwen2", hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32),
    "tied": cases.config("llama", hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32),
    "qk_norm": cases.config("qwen3", hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32),
}
SECTION = RolloutSection(max_batch=16, max_response_tokens=64)


@cache
def made(kind: str, shape: str) -> Any:
    """An engine of that kind and shape, without weights the first time."""
    if kind == "native":
        return NativeEngine(SHAPES[shape], SECTION)
    from docklands.rollout.vllm_engine import VllmEngine

    return VllmEngine(SHAPES[shape], SECTION, longest=256)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(kind: str) -> Iterator[Any]:
    """With the weights of `old()`, version 3."""
    found = made(kind, "untied")
    found.wake()
    found.load_weights(old().named_parameters(), 3)
    found.take_metrics()
    yield found


@cache
def old(shape: str = "untied") -> CausalLM:
    return cases.model(SHAPES[shape], seed=1)


@cache
def new(shape: str = "untied") -> CausalLM:
    return cases.model(SHAPES[shape], seed=2)


def distance(model: CausalLM, requests: list[Request], found: list[Generation]) -> float:
    """Largest difference of the log-probabilities to those of the model's plain forward pass."""
    worst = 0.0
    for request, generation in zip(requests, found, strict=True):
        want = cases.full_logprobs(model, request, list(generation.token_ids))
        worst = max(worst, float((want - torch.tensor(list(generation.logprobs))).abs().max()))
    return worst


def tokens(found: list[Generation]) -> list[list[int]]:
    return [list(generation.token_ids) for generation in found]


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_are_the_trainers_before_and_after_an_update(kind: str, shape: str) -> None:
    """At several temperatures, truncated or not: of the whole vocabulary, at the temperature. Also a tied head."""
    found = made(kind, shape)
    ways = (Sampling(12), Sampling(12, temperature=0.7), Sampling(9, temperature=1.6, top_k=5), Sampling(9, top_p=0.6))
    requests = [r for way in (*ways, Sampling(6, temperature=0.0)) for r in cases.groups(2, 3, way)]
    for version, model in enumerate((old(shape), new(shape), old(shape))):
        found.load_weights(model.named_parameters(), version)
        assert found.version == version
        generations = found.generate(requests)
        assert distance(model, requests, generations) < 1e-4
        assert {v for g in generations for v in g.versions} == {version}
    assert distance(new(shape), requests, generations) > 1e-2


@pytest.mark.parametrize("shape", ["untied", "tied"])
def test_an_update_by_several_threads(kind: str, shape: str) -> None:
    """The trainer's log-probs, also after an error in the middle; and each thread counts its threads as before."""
    found, requests = made(kind, shape), cases.groups(2, 3, Sampling(12))
    before, model = torch.get_num_threads(), new(shape)
    torch.set_num_threads(3)
    try:
        found.load_weights(model.named_parameters(), 5)
        seen: list[int] = [torch.get_num_threads()]
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join(30)
        assert seen == [3, 3] and distance(model, requests, found.generate(requests)) < 1e-4
        wrong = {**dict(old(shape).named_parameters()), "layers.1.o.weight": torch.zeros(1, 1)}
        with pytest.raises(ShapeMismatch, match="layers.1.o.weight"):
            found.load_weights(wrong.items(), 6)
        found.load_weights(old(shape).named_parameters(), 6)
        assert distance(old(shape), requests, found.generate(requests)) < 1e-4
    finally:
        torch.set_num_threads(before)


def test_truncation_and_greed(engine: Any) -> None:
    """Every token is among the top k, in the nucleus, or the best."""
    for way in (Sampling(10, top_k=3), Sampling(10, top_p=0.5), Sampling(10, temperature=0.0)):
        requests = cases.groups(2, 4, way)
        for request, ids in zip(requests, tokens(engine.generate(requests))):
            logits = cases.full_logits(old(), [*request.prompt, *ids])[len(request.prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(ids)[:, None])
            better = (logits > chosen + 1e-4).float()
            if way.top_k or not way.temperature:
                assert better.sum(1).max() < (way.top_k or 1)
            else:
                assert ((torch.softmax(logits, -1) * better).sum(1)).max() < 0.5 + 1e-4


def test_lengths_stops_and_finish_reasons(engine: Any) -> None:
    stops = tuple(range(2, 24))  # about half of the vocabulary: a stop comes soon
    requests = cases.groups(3, 6, Sampling(40, min_tokens=5, stop_ids=stops))
    for request, generation in zip(requests, engine.generate(requests)):
        ids = list(generation.token_ids)
        assert generation.request_id == request.request_id
        assert len(ids) == len(generation.logprobs) == len(generation.versions) > 5
        assert not set(ids[:-1]) & set(stops) and ids[-1] in stops
        assert generation.finish == FINISH_STOP
    found = engine.generate(cases.groups(2, 2, Sampling(7)))
    assert {(len(g.token_ids), g.finish) for g in found} == {(7, FINISH_LENGTH)}


def test_pitfall_11_a_stop_on_the_last_allowed_token_is_a_stop(engine: Any) -> None:
    free = Request(cases.prompt(6), Sampling(12), sample_seed(1, 0, 0, 0), 0)
    ids = tokens(engine.generate([free]))[0]
    at = next(i for i in range(2, 12) if ids[i] not in ids[:i])
    stop = Request(free.prompt, Sampling(at + 1, stop_ids=(ids[at],)), free.seed, 1)
    cut = Request(free.prompt, Sampling(at + 1), free.seed, 2)
    stopped, truncated = engine.generate([stop, cut])
    assert list(stopped.token_ids) == list(truncated.token_ids) == ids[: at + 1]
    assert (stopped.finish, truncated.finish) == (FINISH_STOP, FINISH_LENGTH)


def test_pitfall_10_zero_tokens_asked(engine: Any) -> None:
    nothing, some = (Request(cases.prompt(4), Sampling(n), 0, 5) for n in (0, 3))
    assert engine.generate([nothing]) == [Generation([], [], [], FINISH_LENGTH, 5)]
    assert [len(g.token_ids) for g in engine.generate([nothing, some, nothing])] == [0, 3, 0]
    assert engine.generate([]) == []


def test_a_seed_decides_its_sample(engine: Any) -> None:
    """Twice the same; other seeds, other samples, also of one prompt; a sample that goes on draws anew."""
    requests = cases.groups(2, 8, Sampling(16))  # one batch: bits in other batches are promised by the native only
    first = tokens(engine.generate(requests))
    assert tokens(engine.generate(requests)) == first
    assert len({tuple(ids) for ids in first}) == len(first)
    moved = [replace(request, seed=request.seed ^ (1 << 40)) for request in requests]
    assert sum(a == b for a, b in zip(tokens(engine.generate(moved)), first)) == 0
    later = [replace(request, drawn=4) for request in requests]
    assert sum(a == b for a, b in zip(tokens(engine.generate(later)), first)) == 0


def test_more_samples_than_the_batch_holds(engine: Any) -> None:
    limits = [3, 40, 5, 7, 40, 2, 9, 11, 4, 30, 6, 8] * 3
    requests = [Request(cases.prompt(5, i), Sampling(n), i, i) for i, n in enumerate(limits)]
    found = engine.generate(requests)
    assert [len(g.token_ids) for g in found] == limits
    assert distance(old(), requests, found) < 1e-4
    metrics = engine.take_metrics()
    assert metrics["rollout/decode_tokens"][0] == sum(limits)
    total, steps = metrics["rollout/batch_size"]
    assert 1 < total / steps <= 16


def test_pitfall_19_no_prompt_survives_its_weights(engine: Any) -> None:
    """A prompt long enough to be cached whole, the same before and after."""
    requests = [Request(cases.prompt(150), Sampling(8), k, k) for k in range(4)]
    engine.generate(requests)
    engine.load_weights(new().named_parameters(), 4)
    after = engine.generate(requests)
    assert distance(new(), requests, after) < 1e-4 < 1e-2 < distance(old(), requests, after)


def in_background(engine: Any, requests: list[Request], when: Callable[[], None]) -> list[Generation]:
    """Generate on another thread; `when` runs here once some tokens have been made."""
    began, found, errors = threading.Event(), [], []
    step = engine._iterate
    count = iter(range(1 << 30))

    def counted(queue: Any) -> bool:
        if next(count) == 5:
            began.set()
            assert went.wait(30)
        return step(queue)

    def work() -> None:
        try:
            found.extend(engine.generate(requests))
        except BaseException as error:
            errors.append(error)

    went = threading.Event()
    engine._iterate = counted
    try:
        thread = threading.Thread(target=work)
        thread.start()
        assert began.wait(60)
        when()
        went.set()
        thread.join(60)
    finally:
        del engine._iterate
        went.set()
    if errors:
        raise errors[0]
    return found


def test_abort_returns_what_there_is(engine: Any) -> None:
    requests = cases.groups(10, 3, Sampling(60))
    found = in_background(engine, requests, engine.abort)
    lengths = [len(g.token_ids) for g in found]
    assert len(found) == 30 and {g.finish for g in found} == {FINISH_ABORT}
    assert 0 < max(lengths) < 60 and min(lengths) == 0  # the batch had begun, those beyond it had not
    begun = [i for i, n in enumerate(lengths) if n]
    assert distance(old(), [requests[i] for i in begun], [found[i] for i in begun]) < 1e-4
    assert engine.take_metrics()["rollout/aborted"][0] == 30
    assert [len(g.token_ids) for g in engine.generate(requests[:2])] == [60, 60]


def test_new_weights_reach_running_samples_and_tokens_say_which_made_them(engine: Any) -> None:
    requests = cases.groups(2, 4, Sampling(40))
    found = in_background(engine, requests, lambda: engine.load_weights(new().named_parameters(), 4))
    for generation in found:
        versions = list(generation.versions)
        assert len(generation.token_ids) == len(generation.logprobs) == len(versions) == 40
        assert versions == sorted(versions) and set(versions) == {3, 4}
    cut = [list(g.versions).index(4) for g in found]
    before = [replace(g, token_ids=g.token_ids[:n], logprobs=g.logprobs[:n]) for g, n in zip(found, cut)]
    assert distance(old(), requests, before) < 1e-4


def test_sleep_and_wake(engine: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    requests = cases.groups(1, 2, Sampling(4))
    with caplog.at_level("WARNING", "docklands.rollout"):
        engine.sleep()
    assert ("no sleep" in caplog.text) == (kind == "vllm")  # it frees nothing on CPU, and says so
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate(requests)
    engine.load_weights(new().named_parameters(), 4)
    engine.wake()
    assert distance(new(), requests, engine.generate(requests)) < 1e-4


def test_bad_weights_are_named_and_nothing_is_generated_with_them(engine: Any) -> None:
    named = dict(old().named_parameters())
    requests = cases.groups(1, 1, Sampling(2))
    with pytest.raises(MissingWeight, match="1 weights did not come, first 'final_norm.weight'"):
        engine.load_weights([item for item in named.items() if item[0] != "final_norm.weight"], 9)
    with pytest.raises(RolloutError, match="complete set"):
        engine.generate(requests)
    with pytest.raises(MissingWeight, match="'extra'"):
        engine.load_weights([*named.items(), ("extra", torch.zeros(1))], 9)
    with pytest.raises(ShapeMismatch, match=r"layers.0.o.weight.*\(1, 1\)"):
        engine.load_weights({**named, "layers.0.o.weight": torch.zeros(1, 1)}.items(), 9)
    assert engine.version == 3
    engine.load_weights(named.items(), 10)
    assert distance(old(), requests, engine.generate(requests)) < 1e-4


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request((), Sampling(3), 0, 7), "request 7: the prompt has no tokens"),
        (Request((3, 999), Sampling(3), 0, 7), r"request 7: the prompt has token ids \[999\]"),
        (Request((3,), Sampling(3, top_p=0.0), 0, 7), "request 7: .*out of range"),
        (Request((3,) * 200, Sampling(400), 0, 7), "request 7: 200 prompt"),
    ],
)
def test_bad_requests_are_one_line(engine: Any, request_: Request, said: str) -> None:
    with pytest.raises(RolloutError, match=said) as caught:
        engine.generate([request_])
    assert "\n" not in str(caught.value)
    assert len(engine.generate(cases.groups(1, 1, Sampling(2)))) == 1
