"""Episodes: from admitted prompts to token columns, with one engine or several, with an environment or without.

What the model sampled is trained exactly as sampled: its ids are appended, never decoded and encoded again. Only new
observation text is tokenised, once, and masked. The mask comes from who made a token, never from its id.

Legend: B samples, T tokens of an episode.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from docklands.config.schema import RolloutSection
from docklands.core.batch import Batch
from docklands.core.fields import (
    COMPLETION,
    ENV_REWARD,
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_NAMES,
    FINISH_REASON,
    FINISH_STOP,
    GROUP_ID,
    LOSS_MASK,
    PROMPT,
    PROMPT_ID,
    PROMPT_TOKENS,
    ROLLOUT_LOGPROBS,
    SAMPLE_INDEX,
    TOKEN_IDS,
    WEIGHT_VERSIONS,
    Field,
)
from docklands.core.protocols import Generation, Request, RolloutEngine, Sampling
from docklands.core.stage import Result
from docklands.errors import ConfigError, RolloutError
from docklands.rollout.failures import EnvFailures, fail
from docklands.rollout.partial import Unfinished, of_unfinished_groups
from docklands.rollout.queue import WorkQueue
from docklands.rollout.trajectory import Env, Episode
from docklands.rollout.turns import How, request_of, said


class Tokenizer(Protocol):
    """What an episode needs of a tokenizer."""

    eos_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def render_observation(self, text: str, role: str = "user", ended: bool = True) -> list[int]: ...


class Step(Protocol):
    """An environment's answer to one model turn."""

    @property
    def observation(self) -> str | None: ...

    @property
    def reward(self) -> float: ...

    @property
    def done(self) -> bool: ...


class RolloutWorker:
    """The resource of the role "rollout": engines, tokenizer, environments.

    env_factory  makes the environment of one episode; None: single turn, no environment. Its `failures`, when it has
                 them, is the window that bounds how many episodes may fail
    seed         of the run: a sample's random stream is a hash of (seed, visit, prompt id, sample index)
    routes       the column of router choices, when the engines record them
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        tokenizer: Tokenizer,
        env_factory: Callable[[], Env] | None,
        section: RolloutSection,
        seed: int,
        routes: Field[Any] | None = None,
    ) -> None:
        if not engines:
            raise ConfigError("a rollout worker without engines", "fleet.rollout_workers: 1 or more")
        self._engines, self._tokenizer, self._env_factory = list(engines), tokenizer, env_factory
        self._section, self.seed, self._routes = section, seed, routes
        self._stop_ids = (*sorted(tokenizer.eos_ids), *(self._stop_id(text) for text in section.stop))
        self._aborted, self._stopped = threading.Event(), threading.Event()
        self._failures = EnvFailures(getattr(env_factory, "failures", None))
        self._unfinished = Unfinished()

    @property
    def single_turn(self) -> bool:
        """No environment answers."""
        return self._env_factory is None

    def _stop_id(self, text: str) -> int:
        ids = self._tokenizer.encode(text)
        if len(ids) != 1:
            raise ConfigError(
                f"rollout.stop {text!r} is {len(ids)} tokens, not one", "stop strings must be single tokens"
            )
        return int(ids[0])

    @property
    def sampling(self) -> Sampling:
        """How training samples are drawn."""
        s = self._section
        return Sampling(
            s.max_response_tokens, s.temperature, s.top_k, s.top_p, s.min_response_tokens, stop_ids=self._stop_ids
        )

    # --- the stage function ------------------------------------------------------------------------------------

    def rollout(self, batch: Batch, sampling: Sampling | None = None, visit: int = 0) -> Result:
        """Play one episode per row.

        Reads PROMPT_ID, SAMPLE_INDEX, PROMPT_TOKENS, PROMPT. Writes TOKEN_IDS, LOSS_MASK, ROLLOUT_LOGPROBS,
        WEIGHT_VERSIONS, FINISH_REASON, COMPLETION, ENV_REWARD (and router choices, when recorded) for the rows that go
        on; a row whose environment failed is dropped with the reason "env_error: ..." or "env_timeout: ...". Groups
        that are not finished within rollout.partial_tokens (see rollout.partial), or when `abort` came, are asked for
        again: what is cut short is never trained. After an `abort` so are all, at once.

        sampling  other than the training one (evaluation); without stop ids it gets the tokenizer's
        visit     part of every sample's seed, for another draw of the same prompts
        Raises RolloutError past rollout.sample_deadline_s, naming the pending rows; TooManyEnvErrors.
        """
        training = sampling is None
        sampling = sampling or self.sampling
        sampling = sampling if sampling.stop_ids else replace(sampling, stop_ids=self._stop_ids)
        if training and self._stopped.is_set():
            return Result(later=batch.row_ids.tolist())
        self._aborted.clear()
        prompts, ids, ks = batch[PROMPT_TOKENS], batch[PROMPT_ID].tolist(), batch[SAMPLE_INDEX].tolist()
        most = self._section.partial_tokens if training else 0
        begun = [self._unfinished.resume(row) if most else None for row in batch.row_ids.tolist()]
        episodes = [b or Episode(t.tolist(), len(t), p, k) for b, t, p, k in zip(begun, prompts, ids, ks)]
        how = How(sampling, visit, most, training)
        if self._env_factory is None:
            self._turn([i for i, e in enumerate(episodes) if not e.turns], episodes, batch.row_ids, how)
        else:
            _run(self._play_turns(episodes, batch, how))
        later = of_unfinished_groups(batch[GROUP_ID].numpy(), episodes)
        waiting, ended = np.flatnonzero(later), np.flatnonzero(~later)
        if most:
            self._unfinished.forget(batch.row_ids[ended].tolist())
            self._unfinished.keep(batch.row_ids[waiting].tolist(), [episodes[i] for i in waiting])
        episodes = [episodes[i] for i in ended]
        metrics = self._failures.count(episodes, training) if self._env_factory is not None else {}
        metrics |= {"rollout/unfinished": (float(len(self._unfinished)), 1.0)} if most else {}
        result = self.result(batch.row_ids[ended], episodes, metrics)
        return replace(result, later=batch.row_ids[waiting].tolist())

    def _turn(self, rows: list[int], episodes: list[Episode], row_ids: np.ndarray, how: How) -> None:
        """One model turn for each of `rows`, or what a visit may sample of it."""
        requests = [request_of(episodes[row], int(row_ids[row]), how, self.seed) for row in rows]
        for row, generation in zip(rows, self._generate(requests)):
            said(episodes[row], generation, how, self.text)

    def text(self, ids: Sequence[int], finish: int) -> str:
        """A turn's sampled ids as text, without the stop token."""
        return self._tokenizer.decode(ids[:-1] if finish == FINISH_STOP else ids)

    async def _play_turns(self, episodes: list[Episode], batch: Batch, how: How) -> None:
        """Turn by turn: all unfinished episodes generate together, then their environments answer together."""
        rows = batch[PROMPT]
        await asyncio.gather(*(self._reset(e, rows[i]) for i, e in enumerate(episodes) if e.env is None))
        while live := [i for i, e in enumerate(episodes) if not e.done and not e.paused]:
            self._turn(live, episodes, batch.row_ids, how)
            said = [episodes[i] for i in live if not episodes[i].paused]
            await asyncio.gather(*(self._answer(e, how.sampling.max_tokens) for e in said))
            if self._aborted.is_set():
                for e in episodes:
                    if not e.done and how.training:
                        e.paused = True
                    elif not e.done:
                        e.done, e.finish = True, FINISH_ABORT

    async def _reset(self, episode: Episode, row: Any) -> None:
        assert self._env_factory is not None
        try:
            episode.env = self._env_factory()
            await episode.env.reset(dict(row) if isinstance(row, Mapping) else {"prompt": row})
        except Exception as error:  # an environment is user code: its failure is this sample's, not the run's
            fail(episode, error)

    async def _answer(self, episode: Episode, budget: int) -> None:
        """Hand the last turn to the environment; append its observation if another turn can follow."""
        env = episode.env
        assert env is not None
        if episode.finish == FINISH_ABORT:
            episode.done = True
            return
        try:
            step = await env.step(episode.messages[-1]["content"], FINISH_NAMES[episode.finish])
            reward, over = float(step.reward), bool(step.done)
            ids = self._observed(episode, step.observation, over)
        except Exception as error:  # as above
            fail(episode, error)
            return
        episode.reward += reward
        if over or episode.turns >= env.max_turns or episode.finish == FINISH_LENGTH:
            episode.done = True
        elif episode.response_length + len(ids) >= budget:
            episode.done, episode.finish = True, FINISH_LENGTH  # no room to answer the observation
        else:
            episode.messages.append({"role": "user", "content": str(step.observation)})
            episode.extend_masked(ids)

    def _observed(self, episode: Episode, observation: str | None, over: bool) -> list[int]:
        """The observation's tokens; none when the episode is over."""
        if over or observation is None:
            return []
        return self._tokenizer.render_observation(observation, ended=episode.finish == FINISH_STOP)

    def result(
        self, row_ids: np.ndarray, episodes: Sequence[Episode], metrics: Mapping[str, tuple[float, float]]
    ) -> Result:
        """Of episodes that have ended: what is written for their rows, int64 [B]."""
        kept = [i for i, e in enumerate(episodes) if not e.error]
        dropped = {int(row_ids[i]): e.error for i, e in enumerate(episodes) if e.error}
        played = [episodes[i] for i in kept]
        single = self._env_factory is None
        written: dict[Field[Any], Any] = {
            TOKEN_IDS: [e.tokens for e in played],
            LOSS_MASK: [e.mask for e in played],
            ROLLOUT_LOGPROBS: [e.logprobs for e in played],
            WEIGHT_VERSIONS: [e.versions for e in played],
            FINISH_REASON: [e.finish for e in played],
            COMPLETION: [e.messages[0]["content"] if single else e.messages for e in played],
            ENV_REWARD: [e.reward for e in played],
        }
        if self._routes is not None:
            written[self._routes] = [e.routes_of(self._routes.inner_shape) for e in played]
        return Result(Batch(row_ids[kept], written), dropped, {**metrics, **metrics_of(self._engines)})

    # --- engines -----------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Generation]:
        """One sample per prompt with any sampling, for evaluation; in the order of the prompts."""
        requests = [Request(tuple(p), sampling, s, i) for i, (p, s) in enumerate(zip(prompts, seeds, strict=True))]
        return self._generate(requests)

    def _generate(self, requests: list[Request]) -> list[Generation]:
        """Engines share the groups through one queue: one that is done early takes more. Results in request order."""
        if len(self._engines) == 1:
            return self._engines[0].generate(requests)
        queue = WorkQueue(requests, len(self._engines))
        errors: list[BaseException] = []

        def work(engine: RolloutEngine) -> None:
            try:
                _serve(engine, queue)
            except BaseException as error:  # handed to the caller below
                errors.append(error)
                queue.close()

        threads = [threading.Thread(target=work, args=(engine,), daemon=True) for engine in self._engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._section.sample_deadline_s + 60.0)
        if errors:
            raise errors[0]
        if any(thread.is_alive() for thread in threads):
            raise RolloutError(f"an engine did not return; pending rows: {queue.pending()[:32]}")
        return queue.results()

    def state_dict(self) -> dict[str, Any]:
        """Samples that wait for another visit."""
        return self._unfinished.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See state_dict."""
        self._unfinished.load_state_dict(state)

    @property
    def version(self) -> int:
        """Weight version that every engine holds; the oldest while they differ."""
        return min(engine.version for engine in self._engines)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Into every engine. Several engines need the stream several times: the tensors are kept by reference."""
        stream = weights if len(self._engines) == 1 else list(weights)
        for engine in self._engines:
            engine.load_weights(stream, version)

    def load_adapters(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Into every engine, as `load_weights`; their base stays."""
        stream = list(weights)
        for engine in self._engines:
            engine.load_adapters(stream, version)  # type: ignore[attr-defined]

    def sleep(self) -> None:
        """Free the engines' memory."""
        for engine in self._engines:
            engine.sleep()

    def wake(self) -> None:
        """Ready to generate again."""
        for engine in self._engines:
            engine.wake()

    def abort(self) -> None:
        """End a running rollout soon, and begin none any more, from any thread. Groups that it cuts short are asked for
        again. An evaluation returns its samples as they are; another may follow.
        """
        self._stopped.set()
        self._aborted.set()
        for engine in self._engines:
            engine.abort()


def metrics_of(engines: Sequence[RolloutEngine]) -> dict[str, tuple[float, float]]:
    """Over all engines: counts are added up, the batch size is a mean, the peak of the cache is the largest."""
    found: dict[str, tuple[float, float]] = {}
    for engine in engines:
        take = getattr(engine, "take_metrics", None)
        for name, (total, count) in (take() if take else {}).items():
            old_total, old_count = found.get(name, (0.0, 0.0))
            if name == "rollout/kv_blocks_peak":
                found[name] = max(old_total, total), 1.0
            else:
                found[name] = old_total + total, old_count + count if name == "rollout/batch_size" else 1.0
    return found


def _serve(engine: RolloutEngine, queue: WorkQueue) -> None:
    """Let one engine work on the queue; engines without `serve` get a share at a time."""
    serve = getattr(engine, "serve", None)
    if serve is not None:
        serve(queue)
        return
    while indices := queue.pull(1 << 30):
        for index, generation in zip(indices, engine.generate([queue.requests[i] for i in indices])):
            queue.finish(index, generation)


def _run(play: Coroutine[Any, Any, None]) -> None:
    """Drive the environments: on this thread, or on a thread of its own when a loop runs here already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(play)
        return
    errors: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(play)
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
