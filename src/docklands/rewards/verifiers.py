"""Verifiers from other packages: math-verify and reasoning-gym. Isolated: both can run without end on odd input."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import re
from typing import Any

from docklands.errors import ConfigError, RewardError
from docklands.rewards.base import RewardOutcome, RewardSample, ground_truth, judged
from docklands.rewards.builtin import REWARDS

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@REWARDS.add("math_verify")
class MathVerify:
    """1 when the reply's last mathematical answer equals the expected one, symbolically or numerically.

    An unreadable reply is `wrong`; an expected answer in which nothing can be
    read is an `error` (the data's fault, not the policy's).
    """

    isolate = True

    def __init__(self, column: str = "answer") -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("reward 'math_verify' needs the math-verify package", "pip install math-verify")
        self.column = column
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off

    def warm(self) -> None:
        """Import, and parse once: the parser's own imports are lazy."""
        import math_verify

        math_verify.verify(_parse_gold("1"), _parse_gold("\\frac{1}{2}"), timeout_seconds=0)

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        import math_verify

        expected = str(ground_truth(sample.row, self.column))
        gold = _parse_gold(expected)
        if not gold:
            raise RewardError(f"math_verify cannot read the expected answer {expected!r:.80}")
        # Their own limits use SIGALRM; here the whole process has a deadline.
        said = math_verify.parse(sample.text, parsing_timeout=0)
        right = bool(said) and bool(math_verify.verify(gold, said, timeout_seconds=0))
        shown = next((part for part in said if isinstance(part, str)), None)
        return judged(right, said=shown and shown[:200])


@functools.lru_cache(maxsize=4096)
def _parse_gold(text: str) -> list[Any]:
    import math_verify

    shown = text if "$" in text or "\\boxed" in text else f"${text}$"
    return math_verify.parse(shown, parsing_timeout=0) or math_verify.parse(text, parsing_timeout=0)


@REWARDS.add("reasoning_gym")
class ReasoningGym:
    """The task's own verifier, on rows of a reasoning_gym source: its score from 0 to 1, partial credit included.

    The answer is what stands in the last <answer> tag; without one, the whole stripped reply (`tag_only`: no answer).
    right_from  score from which the outcome counts as ok
    """

    isolate = True

    def __init__(self, tag_only: bool = False, right_from: float = 0.99) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("reward 'reasoning_gym' needs the reasoning-gym package", "pip install reasoning-gym")
        self.tag_only = tag_only
        self.right_from = right_from

    def warm(self) -> None:
        """Import."""
        import reasoning_gym  # noqa: F401

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        recipe = sample.row.get("reasoning_gym")
        if not isinstance(recipe, dict):
            raise RewardError("the row is not of a reasoning_gym source", "data.source: reasoning_gym:NAME")
        task = _task(json.dumps({k: recipe[k] for k in ("name", "seed", "size", "config")}, sort_keys=True))
        item = _item(task, int(recipe["index"]))
        tags = ANSWER_TAG.findall(sample.text)
        said = tags[-1].strip() if tags else None if self.tag_only else sample.text.strip()
        score = float(task.score_answer(answer=said, entry=item))
        return RewardOutcome("ok" if score >= self.right_from else "wrong", score, {"said": said and said[:200]})


@functools.lru_cache(maxsize=64)
def _task(recipe: str) -> Any:
    import reasoning_gym

    made = json.loads(recipe)
    return reasoning_gym.create_dataset(made["name"], seed=made["seed"], size=made["size"], **made["config"])


@functools.lru_cache(maxsize=4096)
def _item(task: Any, index: int) -> dict[str, Any]:
    return task[index]
