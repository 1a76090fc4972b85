"""Built-in rewards: one sample in, one outcome out. `isolate` says whether a call can hang and needs its own process.

A raised RewardError (e.g. a row without an answer) becomes an `error` outcome; see `scoring.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from docklands.errors import ConfigError, DocklandsError, RewardError
from docklands.registry import Registry
from docklands.rewards.base import RewardOutcome, RewardSample, ground_truth, judged, ok

Scorer = Callable[[RewardSample], RewardOutcome]
REWARDS: Registry[Any] = Registry("reward", ("docklands.rewards.verifiers",))
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def make(name: str, args: Mapping[str, Any] | None = None) -> Scorer:
    """A built-in by name. ConfigError for an unknown name or argument."""
    kind = REWARDS.get(name)
    try:
        return kind(**(args or {}))
    except TypeError as error:
        raise ConfigError(f"reward {name!r}: {str(error).removeprefix(kind.__name__ + '.')}") from error
    except DocklandsError:
        raise
    except (ValueError, re.error) as error:
        raise ConfigError(f"reward {name!r}: {error}") from error


def first_number(text: str) -> Decimal | None:
    """The first number written in digits; '1,234.5' is one number; a '-' counts unless it follows a digit."""
    for found in NUMBER.finditer(text):
        digits = found.group().replace(",", "")
        minus_is_dash = digits.startswith("-") and found.start() > 0 and text[found.start() - 1].isalnum()
        return Decimal(digits[1:] if minus_is_dash else digits)
    return None


@REWARDS.add("exact_match")
class ExactMatch:
    """1 when the stripped completion equals the answer."""

    isolate = False

    def __init__(self, column: str = "answer", ignore_case: bool = False) -> None:
        self.column = column
        self.ignore_case = ignore_case

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        said, expected = sample.text.strip(), str(ground_truth(sample.row, self.column)).strip()
        if self.ignore_case:
            said, expected = said.casefold(), expected.casefold()
        return judged(said == expected, said=said[:200])


@REWARDS.add("number")
class Number:
    """1 when the first number in the reply equals the answer, as numbers."""

    isolate = False

    def __init__(self, column: str = "answer") -> None:
        self.column = column

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        expected = first_number(str(ground_truth(sample.row, self.column)))
        if expected is None:
            raise RewardError(f"the answer {ground_truth(sample.row, self.column)!r} holds no number")
        said = first_number(sample.text)
        return judged(said is not None and said == expected, said=None if said is None else str(said.normalize()))


@REWARDS.add("format")
class Format:
    """`value` when the pattern matches the whole completion (`whole: false`: a part of it), else 0.

    Isolated: a pattern can take exponential time, and Python's matcher lets no other thread run meanwhile.
    """

    isolate = True

    def __init__(self, pattern: str, value: float = 1.0, whole: bool = True) -> None:
        compiled = re.compile(pattern, re.DOTALL)
        self.match = compiled.fullmatch if whole else compiled.search
        self.value = value

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        right = self.match(sample.text) is not None
        return RewardOutcome("ok" if right else "wrong", float(self.value) if right else 0.0)


@REWARDS.add("sorted_digits")
class SortedDigits:
    """mix6: 1 when the completion is the prompt's digits in ascending order."""

    isolate = False

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        digits = [c for c in str(sample.row["prompt"]) if c.isdigit()]
        return judged(sample.text == "".join(sorted(digits)))


@REWARDS.add("cot6")
class Cot6:
    """cot6: 1 when what follows the working is the answer. Info: `worked` (working shown), `steps_right`."""

    isolate = False

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        text = sample.text
        worked = text.startswith("<") and ">" in text
        shown, _, answer = text[1:].partition(">") if worked else ("", "", text)
        steps = [_step_is_right(step) for step in shown.split(",")] if worked else []
        right, sound = answer == str(ground_truth(sample.row)), bool(steps) and all(steps)
        return judged(right, said=answer, worked=worked, steps_right=sound)


def _step_is_right(step: str) -> bool:
    found = re.fullmatch(r"(\d{1,9})\+(\d{1,9})=(\d{1,9})", step)
    return found is not None and int(found[1]) + int(found[2]) == int(found[3])


@REWARDS.add("env")
class EnvReward:
    """What the environment itself paid over the episode; ok when positive."""

    isolate = False

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        value = float(sample.env_reward)
        return RewardOutcome("ok" if value > 0 else "wrong", value)


@REWARDS.add("overlong")
class Overlong:
    """DAPO's soft length penalty (arXiv 2503.14476, eq. 13): 0 down to -1 over the last tokens before the limit.

    max_tokens     L_max: from here on -1
    buffer_tokens  L_cache: the penalty starts at max_tokens - buffer_tokens
    """

    isolate = False

    def __init__(self, max_tokens: int, buffer_tokens: int) -> None:
        if not 0 < buffer_tokens <= max_tokens:
            raise ConfigError(
                f"reward 'overlong': buffer_tokens {buffer_tokens} must be positive and at most max_tokens {max_tokens}"
            )
        self.start = max_tokens - buffer_tokens
        self.buffer = buffer_tokens

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        return ok(-min(1.0, max(0.0, (sample.response_tokens - self.start) / self.buffer)))


@REWARDS.add("cosine")
class Cosine:
    """Length-scaled correctness (arXiv 2502.03373, section 4.2): short right answers pay most, short wrong ones least.

    of, args                 the built-in verifier that decides right or wrong, and its arguments
    max_tokens               length at which the cosine ends; a longer or cut response pays `exceed`
    right_short, right_long  value of a right answer at length 0 and at max_tokens; likewise wrong_*
    """

    def __init__(
        self,
        max_tokens: int,
        of: str = "exact_match",
        args: Mapping[str, Any] | None = None,
        values: Mapping[str, float] | None = None,
    ) -> None:
        defaults = {"right_short": 2.0, "right_long": 1.0, "wrong_short": -10.0, "wrong_long": 0.0, "exceed": -10.0}
        unknown = set(values or {}) - set(defaults)
        if unknown or max_tokens < 1:
            raise ConfigError(
                f"reward 'cosine': unknown values {sorted(unknown)} or max_tokens {max_tokens} below 1",
                f"values: {', '.join(defaults)}",
            )
        if of == "cosine":
            raise ConfigError("reward 'cosine' cannot scale itself", "set args.of to a verifier, e.g. math_verify")
        self.max_tokens = max_tokens
        self.inner = make(of, args)
        self.isolate = bool(getattr(self.inner, "isolate", False))
        self.warm = getattr(self.inner, "warm", lambda: None)
        self.values = {**defaults, **(values or {})}

    def __call__(self, sample: RewardSample) -> RewardOutcome:
        outcome = self.inner(sample)
        if outcome.dropped:
            return outcome
        value = self.values["exceed"]
        if sample.finish != "length" and sample.response_tokens <= self.max_tokens:
            kind = "right" if outcome.status == "ok" else "wrong"
            short, long = self.values[f"{kind}_short"], self.values[f"{kind}_long"]
            turn = math.cos(math.pi * sample.response_tokens / self.max_tokens)
            value = long + 0.5 * (short - long) * (1.0 + turn)
        return RewardOutcome(outcome.status, float(value), {**outcome.info, "unscaled": outcome.value})
