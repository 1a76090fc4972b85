"""One reward, loaded and ready to be called: the same code in this process and in a sandbox worker.

A reward is a built-in (one sample at a time) or a user's function with one of two signatures:
    f(prompts, completions, **columns) -> list[float]                               one call for the batch
    compute_score(data_source, solution_str, ground_truth, extra_info) -> float     one call a sample; or a dict
Both may be async. Whatever goes wrong in a call becomes an outcome; this is the project's one broad `except` for it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from docklands.errors import ConfigError, RewardError
from docklands.registry import import_string
from docklands.rewards import builtin
from docklands.rewards.base import RewardOutcome, RewardSample, failed, ground_truth, has_ground_truth, storable

RAISED = "raised"
SIGNATURES = (
    "f(prompts, completions, **columns) -> list[float] or "
    "compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict"
)


@dataclass(frozen=True)
class Target:
    """What to call, by name, so that another process can load it: built-in, module:attr or path/to/file.py:attr."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "args": dict(self.args)}


class Scoring:
    """A loaded reward. `run` gives one outcome per sample and does not raise.

    each     it looks at one sample at a time: a batch may be cut anywhere
    isolate  it asks for a process of its own
    """

    def __init__(self, name: str, isolate: bool, each: bool) -> None:
        self.name = name
        self.isolate = isolate
        self.each = each

    def run(self, samples: Sequence[RewardSample], deadline_s: float | None = None) -> list[RewardOutcome]:
        """Outcomes in order. `deadline_s` bounds awaits; a call that blocks is the sandbox's business."""
        raise NotImplementedError

    def warm(self) -> None:
        """Slow imports, before any deadline counts. Called in sandbox processes only."""


class BuiltinScoring(Scoring):
    """A built-in of the registry."""

    def __init__(self, target: Target) -> None:
        self._scorer = builtin.make(target.name, target.args)
        super().__init__(target.name, bool(getattr(self._scorer, "isolate", False)), each=True)

    def warm(self) -> None:
        getattr(self._scorer, "warm", lambda: None)()

    def run(self, samples: Sequence[RewardSample], deadline_s: float | None = None) -> list[RewardOutcome]:
        return [guarded(lambda s=sample: [self._scorer(s)], 1, deadline_s)[0] for sample in samples]


class ScoreFunction(Scoring):
    """A user's compute_score. Async ones run for the whole batch at once, each sample with its own deadline."""

    def __init__(self, name: str, function: Callable[..., Any], isolate: bool = True) -> None:
        self._function = function
        self._takes = accepted(function)
        self._needs_truth = "ground_truth" in required(function)
        super().__init__(name, isolate, each=not is_async(function))

    def run(self, samples: Sequence[RewardSample], deadline_s: float | None = None) -> list[RewardOutcome]:
        if self.each:
            return [guarded(lambda s=sample: [outcome_of(self._call(s))], 1, deadline_s)[0] for sample in samples]

        async def one(sample: RewardSample) -> RewardOutcome:
            async def call() -> list[RewardOutcome]:
                return [outcome_of(await self._call(sample))]

            return (await aguarded(call, 1, deadline_s))[0]

        async def all_of_them() -> list[RewardOutcome]:
            return list(await asyncio.gather(*map(one, samples)))

        return asyncio.run(all_of_them())

    def _call(self, sample: RewardSample) -> Any:
        row = sample.row
        given = {
            "data_source": row.get("data_source", ""),
            "solution_str": sample.text,
            "extra_info": {**dict(row.get("extra_info") or {}), "finish": sample.finish},
        }
        if self._needs_truth or has_ground_truth(row):
            given["ground_truth"] = ground_truth(row)
        return self._function(**{k: v for k, v in given.items() if self._takes is None or k in self._takes})


class BatchFunction(Scoring):
    """A user's f(prompts, completions, **columns), called once for the batch.

    If that call raises, the samples are scored one by one, so that only the bad ones are lost.
    """

    def __init__(self, name: str, function: Callable[..., Any], isolate: bool = True) -> None:
        self._function = function
        self._takes = accepted(function)
        self._required = required(function) - {"prompts", "completions"}
        super().__init__(name, isolate, each=False)

    def run(self, samples: Sequence[RewardSample], deadline_s: float | None = None) -> list[RewardOutcome]:
        lacking = [sorted(key for key in self._required if sample.row.get(key) is None) for sample in samples]
        good = [sample for sample, keys in zip(samples, lacking, strict=True) if not keys]
        scored = iter(self._score(good, deadline_s) if good else [])
        return [
            failed("error", f"the row has no column {', '.join(map(repr, keys))}") if keys else next(scored)
            for keys in lacking
        ]

    def _score(self, samples: Sequence[RewardSample], deadline_s: float | None) -> list[RewardOutcome]:
        def call() -> list[RewardOutcome]:
            return outcomes_of(self._function(**self._arguments(samples)), len(samples))

        async def acall() -> list[RewardOutcome]:
            return outcomes_of(await self._function(**self._arguments(samples)), len(samples))

        if is_async(self._function):
            outcomes = asyncio.run(aguarded(acall, len(samples), deadline_s))
        else:
            outcomes = guarded(call, len(samples), deadline_s)
        if len(samples) > 1 and all(o.dropped and o.info.get(RAISED) for o in outcomes):
            return [self._score([sample], deadline_s)[0] for sample in samples]
        return outcomes

    def _arguments(self, samples: Sequence[RewardSample]) -> dict[str, list[Any]]:
        """prompts, completions and every column of the rows, as lists; None where a row lacks one."""
        columns = dict.fromkeys(key for sample in samples for key in sample.row)
        given: dict[str, list[Any]] = {key: [sample.row.get(key) for sample in samples] for key in columns}
        given.pop("prompt", None)
        given["prompts"] = [sample.row.get("prompt") for sample in samples]
        given["completions"] = [sample.completion for sample in samples]
        return {k: v for k, v in given.items() if self._takes is None or k in self._takes}


def guarded(call: Callable[[], list[RewardOutcome]], count: int, deadline_s: float | None) -> list[RewardOutcome]:
    """The call's outcomes, or `count` failures that say why there are none."""
    try:
        return call()
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a user's SystemExit must not end the run either
        return _failure(error, count, deadline_s)


async def aguarded(call: Callable[[], Any], count: int, deadline_s: float | None) -> list[RewardOutcome]:
    """`guarded` for a coroutine, which is cancelled at the deadline."""
    try:
        return await asyncio.wait_for(call(), deadline_s)
    except (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException as error:
        return _failure(error, count, deadline_s)


def _failure(error: BaseException, count: int, deadline_s: float | None) -> list[RewardOutcome]:
    if isinstance(error, TimeoutError):
        said = f"TimeoutError: {text_of(error)}" if text_of(error) else f"no result within {deadline_s} s"
        return [failed("timeout", said)] * count
    message = error.message if isinstance(error, RewardError) else f"{type(error).__name__}: {text_of(error)}"
    outcome = failed("error", message)
    if not isinstance(error, BadResult):
        outcome.info[RAISED] = True
    return [outcome] * count


def text_of(error: BaseException) -> str:
    """What an exception says. A user's own may fail at that too."""
    try:
        return str(error)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as another:
        return f"its text cannot be had, {type(another).__name__}"


class BadResult(RewardError):
    """The call returned something that is no score for this batch."""


def outcomes_of(result: Any, count: int) -> list[RewardOutcome]:
    """Outcomes of a batch function's result; BadResult when it is not a sequence of `count`."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise BadResult(f"the reward returned {type(result).__name__}, not a list of {count} numbers")
    if len(result) != count:
        raise BadResult(f"the reward returned {len(result)} values for {count} samples")
    return [outcome_of(value) for value in result]


def outcome_of(value: Any) -> RewardOutcome:
    """A finite number, or a dict with 'score' (the rest is kept as info) -> ok; anything else -> error."""
    info: dict[str, Any] = {}
    if isinstance(value, RewardOutcome):
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            return failed("error", f"the reward returned a dict without 'score': it has {', '.join(map(str, value))}")
        info = {str(k): plain(v) for k, v in value.items() if k != "score"}
        value = value["score"]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item() if getattr(value, "size", 1) == 1 or callable(getattr(value, "size", None)) else value
    if not isinstance(value, int | float):
        return failed("error", f"the reward returned {value!r:.80} ({type(value).__name__}), not a number")
    if not storable(value):
        return failed("error", f"the reward returned {value!r:.40}, which is no finite float32")
    return RewardOutcome("ok", float(value), info)


def plain(value: Any) -> Any:
    """JSON for people: what is no JSON becomes its text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return f"{value!r:.200}"


# --- loading ---------------------------------------------------------------------------------------------------


def load(target: Target) -> Scoring:
    """A reward by name. ConfigError, with one line, when it cannot be found or is no reward."""
    if ":" not in target.name:
        return BuiltinScoring(target)
    try:
        function = load_attribute(target.name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward {target.name!r} fails on import: {type(error).__name__}: {text_of(error)}"
        ) from error
    if inspect.isclass(function):
        try:
            function = function(**target.args)
        except TypeError as error:
            raise ConfigError(f"reward {target.name!r}: {error}", "args must fit its __init__") from error
        return adapt(target.name, function, {})
    return adapt(target.name, function, target.args)


def adapt(name: str, function: Any, args: Mapping[str, Any] | None = None) -> Scoring:
    """A user's callable, recognised by the names of its parameters; `args` are bound to it."""
    if not callable(function):
        raise ConfigError(f"reward {name!r} is a {type(function).__name__}, not a function", f"accepted: {SIGNATURES}")
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError as error:
        raise ConfigError(f"reward {name!r}: {error}", f"accepted: {SIGNATURES}") from error
    takes = accepted(function)
    unknown = [] if takes is None else [key for key in args or {} if key not in takes]
    if unknown:
        raise ConfigError(f"reward {name!r} has no parameter {unknown[0]!r}", f"it takes {', '.join(names)}")
    isolate = bool(getattr(function, "isolate", True))
    bound = functools.partial(function, **args) if args else function
    if "completions" in names:
        return BatchFunction(name, bound, isolate)
    if "solution_str" in names:
        return ScoreFunction(name, bound, isolate)
    raise ConfigError(
        f"reward {name!r} has neither signature: it takes ({', '.join(names)})",
        f"accepted: {SIGNATURES}",
    )


def load_attribute(name: str) -> Any:
    """The object of 'package.module:attr' or 'path/to/file.py:attr'."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return import_string(name, "reward")
    module = _load_file(Path(place).expanduser(), name)
    if not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"reward {name!r}: {place} defines no {attribute!r}", f"it defines {', '.join(own) or 'nothing'}"
        )
    return getattr(module, attribute)


def _load_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward {name!r}: file {str(path)!r} does not exist")
    key = f"docklands_reward_{path.stem}_{abs(hash(str(path.resolve())))}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward {name!r}: {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[key]
        raise ConfigError(
            f"reward {name!r}: {path} fails on import: {type(error).__name__}: {text_of(error)}"
        ) from error
    return module


def is_async(function: Any) -> bool:
    """A coroutine function, bound arguments and callable objects included."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004  an object may be async in its __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def accepted(function: Any) -> set[str] | None:
    """Names that can be passed; None: any (**kwargs)."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def required(function: Any) -> set[str]:
    """Names that must be passed."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in kinds and p.default is p.empty}
