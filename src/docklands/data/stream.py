"""The endless (or epoch-bounded) stream of prompts, with a position that can be saved and restored."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from docklands.config.schema import DataSection, EvalSection
from docklands.data.reasoning import open_reasoning_gym
from docklands.data.rows import Row, normal_row, render_prompt
from docklands.data.sources import Source, Subset, open_file, split_held_out
from docklands.data.tasks import open_demonstrations, open_preferences, open_task
from docklands.data.tokenizer import Tokenizer
from docklands.errors import CheckpointError, ConfigError, DataError

COMPARED = 64
"""Rows that tell whether a resumed run has the data of the first one: evenly spread, from the first to the last."""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt.

    prompt_id  epoch * size + index: stable across runs and resumes, equal prompts in a file stay apart
    tokens     int32 ids of the rendered prompt
    row        the row in plain JSON, its prompt under 'prompt'
    """

    prompt_id: int
    tokens: np.ndarray
    row: Row = field(compare=False)


class PromptStream:
    """Prompts of a source, epoch after epoch, each epoch in an order that only (seed, epoch) decides.

    The position is one number, the rows passed since the start: the end of an epoch and the start of the next are
    the same position, so there is no boundary to get wrong. Rows over the length limit are refused, left out or cut
    on the left, as `config.overlong` says; `dropped` and `truncated` count them.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer, config: DataSection, seed: int) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.config = config
        self.seed = seed
        self.position = 0
        self.dropped = 0
        self.truncated = 0
        self._barren = 0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def size(self) -> int:
        """Rows in an epoch."""
        return len(self.source)

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt."""
        return self.position // self.size

    @property
    def rows_left(self) -> int | None:
        """Rows up to the last epoch's end, dropped ones included; None: endless."""
        return self.config.epochs * self.size - self.position if self.config.epochs else None

    def __iter__(self) -> Iterator[Prompt]:
        while found := self.take(1):
            yield found[0]

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, across epochs; fewer (at last none) when the epochs are over.

        Raises DataError for a row without a prompt, for one too long under `overlong: error`, and when no row is
        short enough.
        """
        found: list[Prompt] = []
        while len(found) < count and self.rows_left != 0:
            epoch, offset = divmod(self.position, self.size)
            prompt = self._render(epoch * self.size + int(self._order_of(epoch)[offset]))
            self.position += 1
            if prompt is not None:
                self._barren = 0
                found.append(prompt)
                continue
            self.dropped += 1
            self._barren += 1
            if self._barren >= 2 * self.size - 1:  # the only short row may be an epoch's first, and the next one's last
                raise self._nothing_fits()
        return found

    def _nothing_fits(self) -> DataError:
        return DataError(
            f"{self.source.name}: all {self.size} prompts exceed {self.config.max_prompt_tokens} tokens",
            "raise data.max_prompt_tokens or set data.overlong: truncate_left",
        )

    def by_id(self, prompt_id: int) -> Prompt:
        """The prompt of an id that this stream has given out, e.g. one that was in flight when a run stopped."""
        if prompt_id < 0:
            raise DataError(f"{self.source.name}: no prompt has the id {prompt_id}")
        truncated = self.truncated
        prompt = self._render(prompt_id)
        self.truncated = truncated
        if prompt is None:
            raise DataError(f"{self.source.where(prompt_id % self.size)}: this prompt was dropped as too long")
        return prompt

    def check(self, most: int = 1000) -> None:
        """Refuse bad input at the start. Keeps no state.

        Every row of a source in memory is looked at. Rendered are the first `most` rows and, of those in memory, the
        `most` with the longest prompts and the shortest: all would take minutes for a large file. Raises DataError.
        """
        order = list(range(min(most, self.size)))
        if self.source.in_memory:
            sizes = [self._prompt_size(index) for index in range(self.size)]
            rest = range(len(order), self.size)
            order += sorted(
                {*heapq.nlargest(most, rest, sizes.__getitem__), *heapq.nsmallest(1, rest, sizes.__getitem__)}
            )
        truncated = self.truncated
        rendered = [self._render(index) is not None for index in order]
        self.truncated = truncated
        _ = self.fingerprint
        if len(order) == self.size and not any(rendered):
            raise self._nothing_fits()

    @cached_property
    def fingerprint(self) -> str:
        """Digest of some rows in their normal form: equal for the same data under another name or key."""
        digest = hashlib.blake2b(digest_size=16)
        for index in np.unique(np.linspace(0, self.size - 1, COMPARED).astype(np.int64)).tolist():
            row = normal_row(self.source[index], self.config.prompt_key, self.source.where(index))
            digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()

    def _prompt_size(self, index: int) -> int:
        """Characters of a row's prompt, as a measure; DataError for a row that cannot be used."""
        prompt = normal_row(self.source[index], self.config.prompt_key, self.source.where(index))["prompt"]
        return len(prompt) if isinstance(prompt, str) else sum(len(str(m["content"])) for m in prompt)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what must be the same for it to mean anything."""
        return {
            "position": self.position,
            "dropped": self.dropped,
            "truncated": self.truncated,
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.config.shuffle,
            "source": self.source.name,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. CheckpointError when the data changed underneath it: prompt ids would mean others."""
        here = self.state_dict()
        for key in ("size", "seed", "shuffle"):
            if state.get(key) != here[key]:
                raise CheckpointError(
                    f"{self.source.name}: data {key} was {state.get(key)!r} when saved and is {here[key]!r} now",
                    "resume with the data and seed of the first run",
                )
        if state["fingerprint"] != here["fingerprint"]:
            raise CheckpointError(
                f"{self.source.name}: other rows than those of {state['source']} when saved "
                f"(of {self.size}, {min(COMPARED, self.size)} were compared)",
                "resume with the data of the first run, or start a new run",
            )
        self.position = int(state["position"])
        self.dropped = int(state["dropped"])
        self.truncated = int(state["truncated"])
        self._barren = 0

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            order = np.arange(self.size)
            if self.config.shuffle:
                order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))).permutation(
                    self.size
                )
            self._order = (epoch, order)
        return self._order[1]

    def _render(self, prompt_id: int) -> Prompt | None:
        """None: too long, and to be dropped."""
        index = prompt_id % self.size
        config, where = self.config, self.source.where(index)
        row = normal_row(self.source[index], config.prompt_key, where)
        ids = render_prompt(row, self.tokenizer, config.chat, config.system_prompt, where)
        if not ids:
            raise DataError(f"{where}: the prompt has no tokens")
        excess = len(ids) - config.max_prompt_tokens
        if excess > 0:
            if config.overlong == "error":
                raise DataError(
                    f"{where}: the prompt has {len(ids)} tokens, the limit is {config.max_prompt_tokens}",
                    "raise data.max_prompt_tokens, or set data.overlong: drop or truncate_left",
                )
            if config.overlong == "drop":
                return None
            self.truncated += 1
            ids = ids[excess:]
        return Prompt(prompt_id, np.asarray(ids, dtype=np.int32), row)


def open_source(spec: str, args: Mapping[str, Any] | None = None, held_out: bool = False) -> Source:
    """A source by its name in the config. `held_out` asks a built-in task for its held-out part.

    Raises DataError or ConfigError, with one line that names the file or the key.
    """
    if not spec:
        raise ConfigError("data.source is empty", "e.g. data.source: task:larger_number, or a path to a .jsonl file")
    kind, _, name = spec.partition(":")
    if kind == "task":
        return open_task(name, args, held_out)
    if kind == "demonstrations":
        return open_demonstrations(name, args)
    if kind == "preferences":
        return open_preferences(name, args)
    if kind == "reasoning_gym":
        return open_reasoning_gym(name, args)
    if args:
        raise ConfigError(f"data.args {sorted(args)} have no meaning for the file {spec!r}", "they belong to tasks")
    return open_file(spec)


def open_splits(data: DataSection, evaluation: EvalSection, seed: int) -> tuple[Source, Source | None]:
    """(training source, held-out source or None when eval.prompts is 0).

    The held-out part is, in this order: eval.source; a built-in task's own, as large as asked for; a seeded part of
    data.source, taken out of it. It never shares a prompt with the training part of the same source.
    """
    if not evaluation.prompts:
        return open_source(data.source, data.args), None
    source = evaluation.source or data.source
    if source == data.source and source.startswith("task:"):
        asked = [evaluation.prompts, data.args.get("held_out", 200), evaluation.args.get("held_out", 0)]
        both = {"held_out": max(asked)}  # one number for both sides, or the parts would overlap
        train = open_source(source, {**data.args, **both})
        held = open_source(source, {**data.args, **evaluation.args, **both}, held_out=True)
    elif source == data.source and not evaluation.args:
        return split_held_out(open_source(source, data.args), evaluation.prompts, seed, data.prompt_key)
    else:
        train = open_source(data.source, data.args)
        held = open_source(source, evaluation.args, held_out=True)
    count = min(evaluation.prompts, len(held))
    return train, Subset(held, np.arange(count), "held-out") if count < len(held) else held
