"""From admitted rows to token columns: masks, finish reasons, environments, several engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests import rollout_cases as cases

from docklands.config.schema import EnvSection, RolloutSection
from docklands.core.batch import Batch
from docklands.core.fields import (
    COMPLETION,
    ENV_REWARD,
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_REASON,
    FINISH_STOP,
    LOSS_MASK,
    PROMPT_TOKENS,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
    WEIGHT_VERSIONS,
)
from docklands.core.protocols import Generation, Request, Sampling
from docklands.envs import build_env_factory
from docklands.errors import ConfigError, EnvError, RolloutError, TooManyEnvErrors
from docklands.rollout import NativeEngine, RolloutWorker, sample_seed

WRITTEN = (TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS, WEIGHT_VERSIONS, FINISH_REASON, COMPLETION, ENV_REWARD)


def worker(engines: int = 1, env: Callable[[], Any] | None = None, seed: int = 7, **section: Any) -> RolloutWorker:
    """Real engines over a tiny random model."""
    settings = RolloutSection(**{"max_batch": 16, "max_response_tokens": 14, **section})
    source = cases.model()
    made = [NativeEngine(source.config, settings) for _ in range(engines)]
    found = RolloutWorker(made, cases.tokenizer(), env, settings, seed)
    found.load_weights(source.named_parameters(), 3)
    return found


class Scripted:
    """An engine that answers with given turns, for cases that a random model does not produce on demand."""

    version = 5

    def __init__(self, *turns: tuple[list[int], int]) -> None:
        self.turns, self.seen = turns, []  # type: ignore[var-annotated]

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        ids, finish = self.turns[min(len(self.seen), len(self.turns) - 1)]
        self.seen.append(list(requests))
        return [
            Generation(ids, [-0.5 - i for i in range(len(ids))], [5] * len(ids), finish, r.request_id) for r in requests
        ]


def scripted(*turns: tuple[list[int], int], env: Any = None, **section: Any) -> tuple[RolloutWorker, Scripted]:
    engine = Scripted(*turns)
    settings = RolloutSection(**{"max_response_tokens": 40, **section})
    return RolloutWorker([engine], cases.tokenizer(), env, settings, 1), engine  # type: ignore[list-item]


class Echo:
    """Says "go" after each turn that is not the last; pays 0.5 a turn."""

    max_turns = 3

    def __init__(self, observation: str = "go", fail_at: int = -1, kind: type[Exception] = EnvError) -> None:
        self.observation, self.fail_at, self.kind, self.heard = observation, fail_at, kind, []  # type: ignore[var-annotated]

    async def reset(self, row: dict[str, Any]) -> None:
        if row.get("broken"):
            raise self.kind("no such row")

    async def step(self, completion: str, finish: str) -> Any:
        await asyncio.sleep(0)
        self.heard.append((completion, finish))
        if len(self.heard) == self.fail_at:
            raise self.kind("tool down")
        done = len(self.heard) == 3
        return SimpleNamespace(observation=None if done else self.observation, reward=0.5, done=done, info={})


def test_single_turn_columns() -> None:
    batch = cases.admitted(["12+7=", "9-3="])
    result = worker().rollout(batch)
    found = result.batch
    assert found is not None and result.dropped == {}
    assert set(found.fields) == set(WRITTEN) and found.row_ids.tolist() == batch.row_ids.tolist()
    for row in range(len(batch)):
        prompt, ids = batch[PROMPT_TOKENS][row].tolist(), found[TOKEN_IDS][row].tolist()
        mask, n = found[LOSS_MASK][row].tolist(), len(prompt)
        assert ids[:n] == prompt and mask == [False] * n + [True] * (len(ids) - n)
        assert len(ids) - n <= 14
        stopped = ids[-1] == 1
        assert found[FINISH_REASON][row] == (FINISH_STOP if stopped else FINISH_LENGTH)
        assert found[COMPLETION][row] == cases.tokenizer().decode(ids[n : len(ids) - stopped])
        assert (found[ROLLOUT_LOGPROBS][row][:n] == 0).all() and (found[ROLLOUT_LOGPROBS][row][n:] < 0).all()
        assert (found[WEIGHT_VERSIONS][row][:n] == -1).all() and (found[WEIGHT_VERSIONS][row][n:] == 3).all()
    assert len({tuple(x.tolist()) for x in found[TOKEN_IDS]}) == len(batch)
    assert result.metrics["rollout/prefill_tokens"] == (9.0, 1.0)


@pytest.mark.parametrize("engines", [2, 4])
def test_pitfall_37_workers_with_one_or_more_engines_agree(engines: int) -> None:
    batch = cases.admitted(["1=", "22+3=", "45=", "8*8=", "0=", "9/3="])
    one, many = worker().rollout(batch), worker(engines).rollout(batch)
    assert one.batch is not None and many.batch is not None
    for column in (TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS, WEIGHT_VERSIONS):
        assert torch.equal(one.batch[column].values, many.batch[column].values)
    assert one.batch[COMPLETION] == many.batch[COMPLETION]
    assert many.metrics["rollout/decode_tokens"] == one.metrics["rollout/decode_tokens"]


def test_seeds_come_from_run_visit_prompt_and_k() -> None:
    batch = cases.admitted(["12="], 4)

    def tokens(made: RolloutWorker, rows: Batch, **more: Any) -> list[list[int]]:
        found = made.rollout(rows, **more).batch
        assert found is not None
        return [x.tolist() for x in found[TOKEN_IDS]]

    base = tokens(worker(), batch)
    assert tokens(worker(), batch.select([2, 0])) == [base[2], base[0]]
    assert tokens(worker(), batch, visit=1) != base
    assert tokens(worker(seed=8), batch) != base
    greedy = tokens(worker(), batch, sampling=Sampling(6, temperature=0.0))
    assert greedy == [greedy[0]] * 4


def test_generate_for_evaluation() -> None:
    made, prompts = worker(2), [cases.prompt(n) for n in (4, 9, 6)]
    found = made.generate(prompts, Sampling(8, temperature=0.0), [0, 1, 2])
    assert found == worker().generate(prompts, Sampling(8, temperature=0.0), [9, 9, 9])
    with pytest.raises(ValueError, match="zip"):
        made.generate(prompts, Sampling(8), [1])


@pytest.mark.parametrize(
    ("ids", "finish", "mask"),
    [
        ([5, 6, 1], FINISH_LENGTH, [1, 1, 1]),  # pad == eos as an ordinary last token: the length ended it
        ([5, 1, 6, 7], FINISH_LENGTH, [1, 1, 1, 1]),  # an eos in the middle that did not stop anything
        ([5, 6, 1], FINISH_STOP, [1, 1, 1]),
        ([0, 0, 0], FINISH_LENGTH, [1, 1, 1]),  # sampled pads train
        ([], FINISH_LENGTH, []),
    ],
)
def test_pitfall_06_the_mask_comes_from_who_made_a_token(ids: list[int], finish: int, mask: list[int]) -> None:
    made, _ = scripted((ids, finish))
    found = made.rollout(cases.admitted(["12="], 1)).batch
    assert found is not None
    assert found[LOSS_MASK][0].tolist() == [False] * 3 + [bool(m) for m in mask]
    assert found[TOKEN_IDS][0].tolist()[3:] == ids
    assert found[FINISH_REASON][0] == finish
    assert found[COMPLETION][0] == cases.tokenizer().decode(ids[:-1] if finish == FINISH_STOP else ids)


def test_pitfall_06_rows_of_unequal_length_are_not_padded() -> None:
    """ids [5, 6, pad, pad] without EOS -> mask 1100: here the pads do not exist at all."""
    batch = cases.admitted(["12=", "7="], 3)
    found = worker(max_response_tokens=9).rollout(batch).batch
    assert found is not None
    sampled = [int(m.sum()) for m in found[LOSS_MASK]]
    assert sampled == [len(ids) - len(p) for ids, p in zip(found[TOKEN_IDS], batch[PROMPT_TOKENS])]


def test_pitfall_10_a_batch_of_nothing_but_empty_responses() -> None:
    made, _ = scripted(([], FINISH_LENGTH))
    found = made.rollout(cases.admitted(["12=", "3="], 2)).batch
    assert found is not None
    assert found.num_trained_tokens == 0 and found[COMPLETION] == ("",) * 4
    assert found[TOKEN_IDS].lengths.tolist() == [3, 3, 2, 2]
    assert torch.isfinite(found[ROLLOUT_LOGPROBS].values).all()
    with_env, _ = scripted(([], FINISH_LENGTH), env=Echo)
    episode = with_env.rollout(cases.admitted(["12="], 1)).batch
    assert episode is not None and episode[FINISH_REASON].tolist() == [FINISH_LENGTH]


def test_pitfall_11_truncation_is_the_finish_reason() -> None:
    found = worker(max_response_tokens=3).rollout(cases.admitted(["12=", "4="], 8)).batch
    assert found is not None
    for ids, mask, finish in zip(found[TOKEN_IDS], found[LOSS_MASK], found[FINISH_REASON]):
        assert (finish == FINISH_LENGTH) == (int(mask.sum()) == 3 and int(ids[-1]) != 1)


def test_pitfall_20_sampled_ids_are_trained_as_sampled() -> None:
    """The pieces "he", "llo" of a turn would be one token if encoded again; the observation is encoded, once."""

    class Pieces:
        eos_ids = frozenset({1})
        texts = {1: "", 10: "he", 11: "llo", 12: "hello", 13: "go"}
        encoded: list[str] = []

        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            self.encoded.append(text)
            return [next(i for i, t in self.texts.items() if t == text)]

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return "".join(self.texts[i] for i in ids)

        def render_observation(self, text: str, role: str = "user", ended: bool = True) -> list[int]:
            return self.encode(text)

    pieces, engine = Pieces(), Scripted(([10, 11, 1], FINISH_STOP))
    made = RolloutWorker([engine], pieces, Echo, RolloutSection(max_response_tokens=40), 1)  # type: ignore[list-item]
    result = made.rollout(cases.admitted(["12="], 1))
    found = result.batch
    assert found is not None
    turn = [10, 11, 1]
    assert found[TOKEN_IDS][0].tolist()[3:] == [*turn, 13, *turn, 13, *turn]
    assert found[LOSS_MASK][0].tolist()[3:] == [True] * 3 + [False] + [True] * 3 + [False] + [True] * 3
    assert found[ROLLOUT_LOGPROBS][0].tolist()[6] == 0.0 and found[WEIGHT_VERSIONS][0].tolist()[6] == -1
    assert pieces.encoded == ["go", "go"]
    assert [list(r[0].prompt)[3:] for r in engine.seen] == [[], [*turn, 13], [*turn, 13, *turn, 13]]
    assert [r[0].sampling.max_tokens for r in engine.seen] == [40, 36, 32]
    assert len({r[0].seed for r in engine.seen}) == 3
    assert found[ENV_REWARD].tolist() == [1.5] and found[FINISH_REASON].tolist() == [FINISH_STOP]
    assert [m["role"] for m in found[COMPLETION][0]] == ["assistant", "user", "assistant", "user", "assistant"]
    assert found[COMPLETION][0][:2] == [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "go"}]


def test_the_budget_is_over_all_turns() -> None:
    turn = [5, 6, 1]
    made, engine = scripted(
        (turn, FINISH_STOP), env=lambda: Echo("123456"), max_response_tokens=10, min_response_tokens=4
    )
    found = made.rollout(cases.admitted(["12="], 1)).batch
    assert found is not None
    assert [(r[0].sampling.max_tokens, r[0].sampling.min_tokens) for r in engine.seen] == [(10, 4), (1, 1)]
    tight, _ = scripted((turn, FINISH_STOP), env=lambda: Echo("1234567"), max_response_tokens=10)
    found = tight.rollout(cases.admitted(["12="], 1)).batch
    assert found is not None  # no token could answer the observation: it is left out, and the length ended the episode
    assert found[TOKEN_IDS][0].tolist()[3:] == turn and found[FINISH_REASON].tolist() == [FINISH_LENGTH]
    assert found[ENV_REWARD].tolist() == [0.5]


def test_a_truncated_turn_ends_the_episode() -> None:
    env = Echo()
    made, _ = scripted(([5, 6], FINISH_LENGTH), env=lambda: env)
    found = made.rollout(cases.admitted(["12="], 1)).batch
    assert found is not None and found[FINISH_REASON].tolist() == [FINISH_LENGTH]
    assert len(env.heard) == 1 and env.heard[0][1] == "length"


@pytest.mark.parametrize("kind", [EnvError, ValueError, KeyError])
def test_a_failing_environment_drops_its_sample_only(kind: type[Exception]) -> None:
    made_envs: list[Echo] = []

    def factory() -> Echo:
        made_envs.append(Echo(fail_at=2 if len(made_envs) == 1 else -1, kind=kind))
        return made_envs[-1]

    made, _ = scripted(([5, 1], FINISH_STOP), env=factory)
    rows = [{"prompt": "a"}, {"prompt": "b", "broken": True}]
    result = made.rollout(cases.admitted(["1=", "2="], 2, rows))
    assert result.batch is not None and result.batch.row_ids.tolist() == [100]
    assert set(result.dropped) == {101, 102, 103}
    assert all(reason.startswith("env_error: ") for reason in result.dropped.values())
    assert "tool down" in result.dropped[101] and "no such row" in result.dropped[102]


def test_all_environments_failing_leaves_an_empty_batch() -> None:
    made, _ = scripted(([5, 1], FINISH_STOP), env=Echo)
    result = made.rollout(cases.admitted(["1="], 2, [{"prompt": "a", "broken": True}]))
    assert result.batch is not None and len(result.batch) == 0 and len(result.dropped) == 2


def test_an_observation_that_cannot_be_encoded_costs_its_sample_and_names_the_environment() -> None:
    made, _ = scripted(([5, 1], FINISH_STOP), env=lambda: Echo("\N{SNOWMAN}"))
    result = made.rollout(cases.admitted(["1="], 1))
    (reason,) = result.dropped.values()
    assert reason.startswith("env_error: environment 'Echo': character '\N{SNOWMAN}'")
    assert result.metrics["env/errors"] == (1.0, 1.0) and result.metrics["env/timeouts"] == (0.0, 1.0)


def test_a_failing_constructor_and_evaluation_count_as_they_should() -> None:
    """A failure in __init__ is a sample's; evaluation's failures end no run, training's do."""

    def broken() -> Echo:
        raise OSError("no licence")

    made, _ = scripted(([5, 1], FINISH_STOP), env=broken)
    batch = cases.admitted(["1=", "2="], 64)
    for _ in range(3):
        assert len(made.rollout(batch, Sampling(4)).dropped) == 128
    assert len(made.rollout(batch).dropped) == 128
    with pytest.raises(TooManyEnvErrors, match=r"256 of the last 256 episodes failed.*OSError: no licence"):
        made.rollout(batch)


def test_environments_are_measured() -> None:
    made, _ = scripted(([5, 1], FINISH_STOP), env=Echo)
    metrics = made.rollout(cases.admitted(["1=", "2="], 1)).metrics
    assert metrics["env/turns/mean"] == (6.0, 2.0) and metrics["env/turns/max"] == (3.0, 1.0)
    assert metrics["env/observation_tokens"] == (2 * 2 * len(cases.tokenizer().encode("go")), 1.0)


def test_the_real_calculator_with_a_scripted_model() -> None:
    """An infrastructure-free tool loop: call, result, answer."""
    tokens = cases.tokenizer()
    call, answer = tokens.encode("<calc>12*3</calc>"), tokens.encode("it is 36")
    factory = build_env_factory(EnvSection(name="calculator", max_turns=3))
    made, engine = scripted(([*call, 1], FINISH_STOP), ([*answer, 1], FINISH_STOP), env=factory, max_response_tokens=90)
    rows = [{"prompt": "12*3=", "answer": 36}]
    found = made.rollout(cases.admitted(["12*3="], 1, rows)).batch
    assert found is not None
    texts = [m["content"] for m in found[COMPLETION][0]]
    assert texts == ["<calc>12*3</calc>", "<result>36</result>", "it is 36"]
    observed = [i for i, m in zip(found[TOKEN_IDS][0].tolist(), found[LOSS_MASK][0].tolist()) if not m][5:]
    assert tokens.decode(observed) == "<result>36</result>"
    assert found[ENV_REWARD].tolist() == [1.0] and len(engine.seen) == 2


def test_real_engines_play_turns() -> None:
    """Log-probs of the second turn are those of the whole context, observation included."""
    source = cases.model()
    found = worker(env=lambda: Echo("12"), max_response_tokens=60, stop=["a", "b", "c", "1", "2"], seed=3).rollout(
        cases.admitted(["7="], 6)
    )
    assert found.batch is not None
    turns = 0
    for ids, mask, logprobs in zip(*(found.batch[c] for c in (TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS))):
        table = torch.log_softmax(cases.full_logits(source, ids.tolist()), -1)
        want = table[:-1].gather(1, ids[1:, None].long()).squeeze(1)
        assert ((want - logprobs[1:]).abs() * mask[1:]).max() < 1e-5
        turns += int((mask[1:] & ~mask[:-1]).sum())
    assert turns > 6


def test_rollout_inside_a_running_loop() -> None:
    made, _ = scripted(([5, 1], FINISH_STOP), env=Echo)

    async def main() -> int:
        found = made.rollout(cases.admitted(["1="], 2)).batch
        return 0 if found is None else len(found)

    assert asyncio.run(main()) == 2


def test_abort_reaches_every_engine() -> None:
    made = worker(2, max_response_tokens=400, stop=[], min_response_tokens=400)
    timer = threading.Timer(0.2, made.abort)
    timer.start()
    batch = cases.admitted(["1=", "2=", "3=", "4="], 8)
    result = made.rollout(batch)
    timer.join()
    assert result.batch is not None and len(result.batch) == 0
    assert result.later == batch.row_ids.tolist(), "what is cut short is asked for again, and never trained"


def test_an_aborted_evaluation_returns_what_it_has() -> None:
    made = worker(2, max_response_tokens=400, stop=[], min_response_tokens=400)
    timer = threading.Timer(0.2, made.abort)
    timer.start()
    found = made.rollout(cases.admitted(["1=", "2="], 8), sampling=made.sampling).batch
    timer.join()
    assert found is not None and set(found[FINISH_REASON].tolist()) == {FINISH_ABORT}


def test_pitfall_27_an_engine_that_fails_ends_the_others() -> None:
    made = worker(2, max_response_tokens=400, min_response_tokens=400, sample_deadline_s=0.1, max_batch=2)
    with pytest.raises(RolloutError, match=r"not finished after 0.1 s; pending request ids: \[1\d\d"):
        made.rollout(cases.admitted(["1=", "2=", "3="], 4))


def test_weights_versions_sleep_and_wake_fan_out() -> None:
    made, source = worker(3), cases.model(seed=2)
    assert made.version == 3
    made._engines[1].load_weights(source.named_parameters(), 4)
    assert made.version == 3  # the oldest
    made.load_weights((pair for pair in source.named_parameters()), 5)  # a generator, read once
    assert [e.version for e in made._engines] == [5, 5, 5]
    made.sleep()
    with pytest.raises(RolloutError, match="asleep"):
        made.rollout(cases.admitted(["1="], 1))
    made.wake()
    found = made.rollout(cases.admitted(["1="], 2)).batch
    assert found is not None and int(found[WEIGHT_VERSIONS].values.max()) == 5


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="'ab' is 2 tokens"):
        worker(stop=["ab"])
    with pytest.raises(ConfigError, match="without engines"):
        RolloutWorker([], cases.tokenizer(), None, RolloutSection(), 0)
    assert worker(stop=["a"]).sampling.stop_ids == (1, cases.tokenizer().encode("a")[0])
    assert np.uint64(sample_seed(7, 0, 40, 0)) != np.uint64(sample_seed(7, 0, 40, 1))
