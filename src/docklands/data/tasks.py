"""Built-in synthetic tasks: rows with a checkable answer, a fixed held-out part, and warm-start demonstrations.

What they are for: `larger_number` is the quick start; `mix6` and `cot6` are the tiny models' tasks, whose
demonstrations are constructed on purpose (see each); `calculator` needs the tool environment of the same name.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from docklands.data.sources import ListSource, Source
from docklands.errors import ConfigError
from docklands.registry import Registry

Row = dict[str, Any]
DIGITS = string.digits
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


@dataclass(frozen=True)
class Task:
    """A built-in task.

    rows         (**args) -> (training rows, held-out rows); the two share no prompt, whatever the args
    demonstrate  (row, random stream, **options) -> (response, behaviour's name); None: no demonstrations
    characters   alphabet of a character tokenizer that can read and write the task
    """

    name: str
    rows: Callable[..., tuple[list[Row], list[Row]]]
    demonstrate: Callable[..., tuple[Any, str]] | None
    characters: str


TASKS: Registry[Task] = Registry("task")


def open_task(name: str, args: Mapping[str, Any] | None = None, held_out: bool = False) -> Source:
    """Rows of a built-in task: its training part or its held-out part.

    Raises ConfigError for an unknown task or argument.
    """
    task = _get(name)
    given = dict(args or {})
    _check_args(f"task {name!r}", task.rows, given)
    train, rest = task.rows(**given)
    return ListSource(f"task:{name}[held-out]" if held_out else f"task:{name}", rest if held_out else train)


def open_demonstrations(name: str, args: Mapping[str, Any] | None = None, seed: int = 0) -> Source:
    """Warm-start rows {"prompt", "response", "answer", "behaviour"}: one demonstration per training row.

    `seed` (overridden by the argument of that name) draws the behaviours. `args` are the task's own
    arguments and the demonstrations' (e.g. cot6: direct, wrong). Held-out prompts are never shown.
    Raises ConfigError when the task has none.
    """
    task = _get(name)
    if task.demonstrate is None:
        raise ConfigError(f"task {name!r} has no demonstrations")
    own = set(inspect.signature(task.rows).parameters)
    given = {k: v for k, v in (args or {}).items() if k in own}
    options = {k: v for k, v in (args or {}).items() if k not in own}
    _check_args(f"task {name!r}", task.rows, given)
    _check_args(f"demonstrations of task {name!r}", task.demonstrate, options, skip=2)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([given.get("seed", seed), 0x5F7])))
    rows = []
    for row in task.rows(**given)[0]:
        response, behaviour = task.demonstrate(row, rng, **options)
        rows.append({**row, "response": response, "behaviour": behaviour})
    return ListSource(f"task:{name}[demonstrations]", rows)


def open_preferences(name: str, args: Mapping[str, Any] | None = None, seed: int = 0) -> Source:
    """Rows {"prompt", "chosen", "rejected", ...}: the answer, and a demonstration that is another one.

    Rows whose demonstration is the answer are left out. See open_demonstrations for the rest.
    """
    pairs = []
    demonstrations = open_demonstrations(name, args, seed)
    for index in range(len(demonstrations)):
        row = dict(demonstrations[index])
        rejected = row.pop("response")
        if isinstance(rejected, str) and rejected != row["answer"]:
            pairs.append({**row, "chosen": row["answer"], "rejected": rejected})
    return ListSource(f"task:{name}[preferences]", pairs)


def _get(name: str) -> Task:
    task = TASKS.get(name)
    if not isinstance(task, Task):
        raise ConfigError(f"task {name!r} is a {type(task).__name__}", "it must be a docklands.data.tasks.Task")
    return task


def _check_args(what: str, function: Callable[..., Any], given: Mapping[str, Any], skip: int = 0) -> None:
    known = dict(list(inspect.signature(function).parameters.items())[skip:])
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{what}: unknown argument {key!r}", f"it takes {', '.join(known) or 'none'}")
        default = known[key].default
        if isinstance(default, int) and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(f"{what}: {key} must be a whole number, not {value!r}")
        if key == "seed" and value < 0:
            raise ConfigError(f"{what}: seed must be 0 or more, not {value}")
        numbers = isinstance(value, list | tuple) and all(isinstance(x, int | float) for x in value)
        if isinstance(default, tuple) and not numbers:
            raise ConfigError(f"{what}: {key} must be a list of numbers, not {value!r}")
        if isinstance(default, float) and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise ConfigError(f"{what}: {key} must be a share from 0 to 1, not {value!r}")


def _split(count: int, size: int, held_out: int, seed: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) indices into a task's `count` possible items. The held-out ones depend on no seed.

    size 0: all that are left.
    """
    if held_out < 1 or size < 0 or size + held_out > count:
        raise ConfigError(f"task {name!r}: size {size} + held_out {held_out} must fit into {count} distinct items")
    order = np.random.Generator(np.random.PCG64(20251)).permutation(count)
    rest = order[held_out:]
    chosen = np.random.Generator(np.random.PCG64(seed)).permutation(len(rest))[: size or len(rest)]
    return rest[chosen], order[:held_out]


def _check_length(task: str, key: str, value: int) -> None:
    if not 1 <= value <= 6:
        raise ConfigError(f"task {task!r}: {key} must be from 1 to 6, not {value}")


# --- larger_number ---------------------------------------------------------------------------------------------


def larger_number(size: int = 0, held_out: int = 200, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Two distinct numbers from 10 to 99. A held-out pair occurs in training in neither order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    train, rest = _split(len(pairs), 0, held_out, seed, "larger_number")
    both = [pairs[i] for i in train] + [pairs[i][::-1] for i in train]
    if size > len(both):
        raise ConfigError(f"task 'larger_number': size {size} is more than its {len(both)} training rows")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(both))[: size or len(both)]
    flips = np.random.Generator(np.random.PCG64(7)).integers(0, 2, len(rest))
    shown = [pairs[i][::-1] if flip else pairs[i] for i, flip in zip(rest, flips, strict=True)]
    return [_larger_row(*both[i]) for i in order], [_larger_row(*pair) for pair in shown]


def _larger_row(a: int, b: int) -> Row:
    prompt = f"Which number is larger, {a} or {b}? Reply with the number only."
    return {"prompt": prompt, "answer": str(max(a, b)), "data_source": "larger_number"}


def _say_larger(row: Row, rng: np.random.Generator, right: float = 1.0) -> tuple[str, str]:
    """The right number with probability `right`, else the other."""
    numbers = [word.rstrip("?") for word in row["prompt"].split() if word.rstrip("?").isdigit()]
    if rng.random() < right:
        return row["answer"], "right"
    return next(n for n in numbers if n != row["answer"]), "wrong"


# --- mix6 ------------------------------------------------------------------------------------------------------


def mix6(size: int = 10000, held_out: int = 200, digits: int = 6, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """'483920=' -> the digits in ascending order."""

    def row(index: int) -> Row:
        text = f"{index:0{digits}d}"
        return {"prompt": text + "=", "answer": "".join(sorted(text)), "data_source": "mix6"}

    _check_length("mix6", "digits", digits)
    train, rest = _split(10**digits, size, held_out, seed, "mix6")
    return [row(int(i)) for i in train], [row(int(i)) for i in rest]


BEHAVIOURS: Mapping[str, Callable[[str], str]] = {
    "ascending": lambda text: "".join(sorted(text)),
    "descending": lambda text: "".join(sorted(text, reverse=True)),
    "reversed": lambda text: text[::-1],
    "copy": lambda text: text,
}


def _mix6_answer(row: Row, rng: np.random.Generator, weights: Sequence[float] = (1, 1, 1, 1)) -> tuple[str, str]:
    """One of four behaviours, by weight. Only the first is rewarded: learning selects and sharpens it."""
    share = np.asarray(weights, dtype=np.float64)
    if share.shape != (len(BEHAVIOURS),) or (share < 0).any() or share.sum() <= 0:
        raise ConfigError(f"task 'mix6': weights {list(weights)!r} are not four shares of {', '.join(BEHAVIOURS)}")
    name = list(BEHAVIOURS)[int(rng.choice(len(BEHAVIOURS), p=share / share.sum()))]
    return BEHAVIOURS[name](row["prompt"].rstrip("=")), name


# --- cot6 ------------------------------------------------------------------------------------------------------


def cot6(size: int = 10000, held_out: int = 200, terms: int = 6, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """'3+5+2+7+1+4=' -> the sum of one-digit numbers."""

    def row(index: int) -> Row:
        numbers = [int(c) for c in f"{index:0{terms}d}"]
        return {"prompt": "+".join(map(str, numbers)) + "=", "answer": str(sum(numbers)), "data_source": "cot6"}

    _check_length("cot6", "terms", terms)
    train, rest = _split(10**terms, size, held_out, seed, "cot6")
    return [row(int(i)) for i in train], [row(int(i)) for i in rest]


def working(prompt: str) -> str:
    """'3+5+2=' -> '<3+5=8,8+2=10>'."""
    numbers = [int(part) for part in prompt.rstrip("=").split("+")]
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    return f"<{','.join(steps)}>"


def _cot6_answer(row: Row, rng: np.random.Generator, direct: float = 0.7, wrong: float = 0.85) -> tuple[str, str]:
    """Direct answers (a share `wrong` of them deliberately wrong) and, for the rest, right ones with working.

    Constructed so that showing the working is the better habit but the rarer one; with right direct answers there
    is nothing to learn.
    """
    answer = int(row["answer"])
    if rng.random() >= direct:
        return f"{working(row['prompt'])}{answer}", "working"
    if rng.random() >= wrong:
        return str(answer), "direct right"
    off = int(rng.integers(1, 10))
    return str(answer - off if rng.random() < 0.5 and answer >= off else answer + off), "direct wrong"


# --- calculator ------------------------------------------------------------------------------------------------


def calculator(
    size: int = 2000, held_out: int = 200, style: str = "chat", seed: int = 0, largest: int = 99
) -> tuple[list[Row], list[Row]]:
    """'What is 12*(3+47)?' in words (style chat) or as '12*(3+47)=' (style completion)."""
    if style not in ("chat", "completion") or not 10 <= largest <= 99:
        raise ConfigError(
            f"task 'calculator': style {style!r}, largest {largest}", "style: chat or completion; largest: 10 to 99"
        )

    def row(index: int) -> Row:
        rest, a = divmod(index, largest)
        rest, b = divmod(rest, largest)
        form, c = divmod(rest, largest)
        a, b, c = a + 1, b + 1, c + 1
        text, answer = [
            (f"{a}*({b}+{c})", a * (b + c)),
            (f"{a}*{b}-{c}", a * b - c),
            (f"({a}-{b})*{c}", (a - b) * c),
        ][form]
        prompt = f"{text}="
        if style == "chat":
            prompt = f"What is {text}? To calculate, write <calc>EXPRESSION</calc> and wait. End with the number only."
        return {"prompt": prompt, "answer": str(answer), "expression": text, "data_source": "calculator"}

    train, rest = _split(3 * largest**3, size, held_out, seed, "calculator")
    return [row(int(i)) for i in train], [row(int(i)) for i in rest]


def _use_calculator(row: Row, rng: np.random.Generator, direct: float = 0.0) -> tuple[Any, str]:
    """A call, the tool's reply and the answer; a share `direct` guesses instead, and is wrong."""
    if rng.random() < direct:
        return str(int(row["answer"]) + int(rng.integers(1, 100))), "direct wrong"
    turns = [
        {"role": "assistant", "content": f"<calc>{row['expression']}</calc>"},
        {"role": "user", "content": f"<result>{row['answer']}</result>"},
        {"role": "assistant", "content": row["answer"]},
    ]
    return turns, "tool"


TASKS.add("larger_number")(Task("larger_number", larger_number, _say_larger, PRINTABLE))
TASKS.add("mix6")(Task("mix6", mix6, _mix6_answer, DIGITS + "="))
TASKS.add("cot6")(Task("cot6", cot6, _cot6_answer, DIGITS + "+=<>,"))
TASKS.add("calculator")(Task("calculator", calculator, _use_calculator, PRINTABLE))
