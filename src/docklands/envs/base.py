"""The environment protocol. An environment deals in text; token ids are the rollout floor's business.

An observation is tokenised once, appended, and masked from the loss; what the model sampled is never tokenised again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from docklands.errors import EnvError, EnvTimeout
from docklands.registry import Registry


@dataclass(frozen=True)
class StepResult:
    """The answer to one model turn.

    observation  text that the model sees before its next turn; None: nothing more is said
    reward       what this turn earned
    done         the episode is over
    """

    observation: str | None
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One episode at a time: `reset`, then `step` until done or `max_turns`.

    finish  'stop', 'length' or 'abort': how the model's turn ended
    """

    max_turns: int

    async def reset(self, row: dict[str, Any]) -> None: ...

    async def step(self, completion: str, finish: str) -> StepResult: ...


MOST_PAID = 3.4e38
"""What an episode may earn: rewards are float32 in the table."""

ENVS: Registry[Any] = Registry("environment", ("docklands.envs.single_turn", "docklands.envs.calculator"))


class GuardedEnv:
    """An environment whose every failure is an EnvError with one clear line, and whose every call has a deadline.

    The rollout floor drops and counts the sample. A synchronous block inside an environment cannot be interrupted.
    """

    def __init__(self, env: Env, name: str, deadline_s: float) -> None:
        self._env = env
        self.name = name
        self._deadline_s = deadline_s
        self._turns = 0
        self._paid = 0.0
        self._done = True

    @property
    def max_turns(self) -> int:
        return self._env.max_turns

    async def reset(self, row: Mapping[str, Any]) -> None:
        """Start an episode on a copy of the row."""
        await self._call(self._env.reset(dict(row)), "reset")
        self._turns, self._paid, self._done = 0, 0.0, False

    async def step(self, completion: str, finish: str) -> StepResult:
        """One turn; the last allowed one is always done. EnvError after the end, or for a malformed result."""
        if self._done:
            raise EnvError(f"environment {self.name!r}: step after the end of the episode, or before reset")
        result = await self._call(self._env.step(completion, finish), "step")
        self._check(result)
        self._turns += 1
        self._paid += result.reward
        last = self._turns >= self.max_turns
        self._done = result.done or last
        if last and not result.done:
            return StepResult(None, result.reward, True, {**result.info, "out_of_turns": True})
        return result

    async def _call(self, call: Any, verb: str) -> Any:
        try:
            return await asyncio.wait_for(call, self._deadline_s)
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise
        except TimeoutError as error:
            said = str(error) or f"no answer within {self._deadline_s:g} s"
            raise EnvTimeout(f"environment {self.name!r}, {verb}: {said}", "raise env.deadline_s") from error
        except EnvError:
            raise
        except Exception as error:
            message = " ".join(str(error).split())[:300]
            raise EnvError(f"environment {self.name!r}, {verb}: {type(error).__name__}: {message}") from error

    def _check(self, result: Any) -> None:
        said = getattr(result, "observation", None)
        reward = getattr(result, "reward", None)
        good = isinstance(result, StepResult) and (said is None or isinstance(said, str))
        if not good or isinstance(reward, str) or reward is None or not abs(self._paid + reward) <= MOST_PAID:
            raise EnvError(f"environment {self.name!r}, step: returned {result!r:.200}, not a StepResult with a number")
        if said is None and not result.done:
            raise EnvError(f"environment {self.name!r}, step: neither an observation nor the end of the episode")
