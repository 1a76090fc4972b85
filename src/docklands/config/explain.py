"""Faults of a configuration in one line each: the dotted path, the value, what was expected, where it stands."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from docklands.config.tree import PathKey, schema_leaves, schema_sections, section_of
from docklands.errors import ConfigError

EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section (a mapping of keys)",
    "model_attributes_type": "a section (a mapping of keys)",
}
ELSEWHERE = {
    "answer_key": "reward.functions[].args",
    "batch_size": "rollout.prompts_per_step",
    "beta": "algorithm.kl.coef",
    "cliprange": "algorithm.clip_high",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "group_size": "rollout.samples_per_prompt",
    "kl_coef": "algorithm.kl.coef",
    "learning_rate": "train.optim.lr",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_rank": "lora.rank",
    "max_completion_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_steps": "run.steps",
    "mini_batch_size": "algorithm.samples_per_update",
    "num_generations": "rollout.samples_per_prompt",
    "num_samples": "rollout.samples_per_prompt",
    "output_dir": "run.dir",
    "target_modules": "lora.targets",
    "total_steps": "run.steps",
    "use_rslora": "lora.rslora",
}
"""What other systems call some keys."""

BOUNDS = {"greater_than": (">", "gt"), "greater_than_equal": (">=", "ge"), "less_than": ("<", "lt")}
BOUNDS["less_than_equal"] = ("<=", "le")


def unknown_key(path: PathKey, source: str) -> ConfigError:
    """The error for a key that the schema does not have, with the nearest key of any section as a hint."""
    name = ".".join(str(part) for part in path)
    if "." in str(path[-1]):
        parts = str(path[-1]).split(".")
        return ConfigError(
            f"unknown key {name!r} ({source})",
            f"in a file, keys are nested: {': { '.join(parts)}: ...{' }' * (len(parts) - 1)}",
        )
    near = nearest(path)
    hint = "did you mean " + " or ".join(near) + "?" if near else keys_of(path[:-1])
    return ConfigError(f"unknown key {name} ({source})", hint)


def nearest(path: PathKey) -> list[str]:
    """Up to three dotted keys that `path` may have meant.

    In this order: the same name in another section, what another system calls it, a near name.
    """
    words = [str(part) for part in path]
    known = [key for key, _ in schema_leaves()] + [key for key, _ in schema_sections()]
    last = words[-1]
    same = [key for key in known if key.split(".")[-1] == last]
    if same:
        return rank(same, words)[:3]
    if last in ELSEWHERE:
        return [ELSEWHERE[last]]
    names = near_names(last, {key.split(".")[-1] for key in known})
    if names:
        found = rank([key for name in names for key in known if key.split(".")[-1] == name], words)
        return found[: 1 if len(words) > 1 else 3]
    if path[:-1] and section_of(path[:-1]) is not None:
        return []  # better said by what the section has
    return near_names(".".join(words), set(known))[:1]


def keys_of(path: PathKey) -> str:
    """A hint that lists what the section at `path` has."""
    section = section_of(path) if path else None
    if section is None:
        return "`docklands config show` lists every key"
    return f"{'.'.join(map(str, path))} has {', '.join(section.model_fields)}"


def near_names(word: str, known: set[str]) -> list[str]:
    """Up to three names about as near to `word` as the nearest, best first; none when nothing is near."""
    plain = word.replace("-", "_").lower()
    scored = sorted((-nearness(plain, name), name) for name in known)
    best = -scored[0][0]
    return [name for score, name in scored[:3] if -score >= max(0.6, best - 0.1)]


def nearness(word: str, name: str) -> float:
    """0..1: how alike two names are; a name that begins as the other, or has all its words, counts as near."""
    parts = set(word.split("_"))
    ratio = difflib.SequenceMatcher(None, name, word).ratio()
    if len(word) > 2 and name.startswith(word):
        return max(ratio, 0.85)
    return max(ratio, 0.85) if len(parts) > 1 and parts <= set(name.split("_")) else ratio


def rank(keys: list[str], words: list[str]) -> list[str]:
    """Keys in or near the section that the user wrote in come first; in the order of the schema otherwise."""
    section = ".".join(words[:-1])
    if not section:
        return keys

    def distance(key: str) -> float:
        return -difflib.SequenceMatcher(None, key.rpartition(".")[0], section).ratio()

    best = sorted(keys, key=distance)
    return best[:1] if best[0].rpartition(".")[0] == section else best


def explain(error: ValidationError, origin: Callable[[PathKey], str]) -> ConfigError:
    """One line per fault, each with the source of its value."""
    lines = [fault_line(dict(fault), origin) for fault in error.errors(include_url=False)]
    return ConfigError("\n".join(dict.fromkeys(lines)))


def fault_line(fault: dict[str, Any], origin: Callable[[PathKey], str]) -> str:
    """`path: got value, expected kind (file:line)`."""
    path: PathKey = tuple(fault["loc"])
    kind, context = fault["type"], fault.get("ctx") or {}
    if kind == "value_error":
        return model_fault(str(fault["msg"]).removeprefix("Value error, "), path, origin)
    if kind == "json_invalid":  # values travel as JSON; all else that is wrong with them was said before
        return f"a text is no Unicode (half of a surrogate pair): {context['error']}"
    name = ".".join(str(part) for part in path)
    if kind == "missing":
        return f"{name}: is required{place(path, origin)}"
    if kind in EXPECTED:
        wanted = EXPECTED[kind]
    elif kind in BOUNDS:
        sign, bound = BOUNDS[kind]
        wanted = f"a value {sign} {context[bound]:g}"
    elif kind == "literal_error":
        wanted = str(context["expected"]).replace("'", "")
    elif kind in ("too_long", "too_short"):
        wanted = f"{context.get('max_length', context.get('min_length'))} values"
    else:
        wanted = str(fault["msg"])
    return f"{name}: got {shown(fault['input'])}, expected {wanted}{place(path, origin)}"


def model_fault(message: str, path: PathKey, origin: Callable[[PathKey], str]) -> str:
    """A check of several keys names the first one itself; its source is added when it was given."""
    name = message.split(":")[0].split(" ")[0]
    named: PathKey = tuple(name.split("."))
    if section_of(named[:-1]) is None or origin(named) == "default":
        return message
    return message + place(named, origin)


def place(path: PathKey, origin: Callable[[PathKey], str]) -> str:
    """` (file:line)`."""
    return f" ({origin(path)})"


def shown(value: Any) -> str:
    """A value for an error message: short, on one line, with text in quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
