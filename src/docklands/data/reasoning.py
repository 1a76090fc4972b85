"""Tasks of the reasoning-gym package as a source.

Its item i is made from seed + i: the data of seed s and of seed s + 1 are the same but for one item, so another
seed is no held-out set. Use a held-out part by content (`sources.split_held_out`).
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from typing import Any

from docklands.data.rows import plain
from docklands.errors import ConfigError, DataError

Row = dict[str, Any]


class ReasoningGymSource:
    """`size` items of one task, generated when first read and then kept.

    A row carries what the verifier needs to rebuild the item: {"reasoning_gym": {name, seed, size, config, index}}.
    """

    in_memory = False

    def __init__(self, task: str, size: int = 1000, seed: int = 0, config: Mapping[str, Any] | None = None) -> None:
        self.name = f"reasoning_gym:{task}"
        self._recipe = {"name": task, "seed": int(seed), "size": int(size), "config": dict(config or {})}
        self._dataset = _create(self._recipe)
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return int(self._recipe["size"])

    def __getitem__(self, index: int) -> Row:
        if index not in self._rows:
            self._rows[index] = self._make(index)
        return self._rows[index]

    def _make(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        item = self._dataset[index]
        row: Row = {
            "prompt": item["question"],
            "answer": plain(item["answer"], self.where(index)),
            "data_source": self.name,
            "reasoning_gym": {**self._recipe, "index": index},
        }
        try:
            row["metadata"] = plain(item["metadata"], self.where(index))
        except DataError:  # some tasks keep Python objects there; the verifier rebuilds the item and does not need it
            pass
        return row

    def where(self, index: int) -> str:
        return f"{self.name}, item {index}"


def open_reasoning_gym(task: str, args: Mapping[str, Any] | None = None) -> ReasoningGymSource:
    """args: size, seed, and everything else for the task's own config. ConfigError for a name or key it lacks."""
    given = dict(args or {})
    size, seed = given.pop("size", 1000), given.pop("seed", 0)
    config = {**given.pop("config", {}), **given}
    if not isinstance(size, int) or not isinstance(seed, int) or size < 1:
        raise ConfigError(f"reasoning_gym:{task}: size {size!r} and seed {seed!r} must be whole numbers, size > 0")
    return ReasoningGymSource(task, size, seed, config)


def _create(recipe: Mapping[str, Any]) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("reasoning_gym tasks need the reasoning-gym package", "pip install reasoning-gym")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name = recipe["name"]
    if name == "composite":
        raise ConfigError("reasoning_gym:composite is not supported", "name one of its member tasks")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 1)
        raise ConfigError(
            f"reasoning_gym has no task {name!r}", f"did you mean {near[0]!r}?" if near else f"{len(DATASETS)} tasks"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=recipe["seed"], size=recipe["size"], **recipe["config"])
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reasoning_gym:{name}: {error}", "data.args holds size, seed and the task's own keys"
        ) from error
