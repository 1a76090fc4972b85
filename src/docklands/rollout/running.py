"""The running batch: one row per sequence in flat arrays, so that a step needs no Python per sequence.

Legend: R rows in use (0..count-1, dense), a row's arrays are moved when one before it leaves; L layers with experts,
k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from docklands.core.protocols import Generation, Request
from docklands.rollout.attention import RowPages


@dataclass(eq=False)
class Prompt:
    """A prompt whose keys and values are in the cache, shared by its samples.

    pages    physical pages, in order
    hidden   final hidden state of its last token [D], from which every sample's first token is drawn
    routes   router choices of its tokens, int16 [tokens, L, k]; None when they are not recorded
    places   places taken by running samples
    """

    tokens: tuple[int, ...]
    pages: np.ndarray
    hidden: object = None
    routes: np.ndarray | None = None
    places: set[int] = field(default_factory=set)

    def take_place(self) -> int:
        """The lowest free place."""
        place = next(i for i in range(len(self.places) + 1) if i not in self.places)
        self.places.add(place)
        return place


class RunningBatch:
    """Arrays over rows.

    tokens, logprobs, versions [rows, capacity]: what was sampled. own, prompt: page tables, -1 beyond their end.
    made     sampled so far;  stored: of these, in the cache (the last sampled one is not, until it is fed)
    routes   [rows, capacity, L, k]: router choices of the fed ones, -1 for the others. `routed`: (L, k); None: none
    """

    def __init__(self, rows: int, stops: int, routed: tuple[int, int] | None = None) -> None:
        self.count = 0
        self.index = np.zeros(rows, np.int64)
        self.order = np.zeros(rows, np.int64)
        self.made = np.zeros(rows, np.int64)
        self.prompt_length = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.minimum = np.zeros(rows, np.int64)
        self.seed = np.zeros(rows, np.uint64)
        self.drawn = np.zeros(rows, np.int64)
        self.temperature = np.zeros(rows, np.float64)
        self.top_k = np.zeros(rows, np.int64)
        self.top_p = np.ones(rows, np.float64)
        self.last = np.zeros(rows, np.int64)
        self.place = np.zeros(rows, np.int64)
        self.stops = np.full((rows, max(1, stops)), -1, np.int64)
        self.own = np.full((rows, 4), -1, np.int64)
        self.prompt = np.full((rows, 4), -1, np.int64)
        self.tokens = np.zeros((rows, 64), np.int32)
        self.logprobs = np.zeros((rows, 64), np.float32)
        self.versions = np.zeros((rows, 64), np.int32)
        self.routes = None if routed is None else np.full((rows, 64, *routed), -1, np.int16)
        self.prompts: list[Prompt] = []

    @property
    def room(self) -> int:
        """Rows not in use."""
        return len(self.index) - self.count

    def add(self, index: int, request: Request, prompt: Prompt, order: int) -> int:
        """Put a sample into the next row; -> the row."""
        row, s = self.count, request.sampling
        self.count += 1
        self.prompts.append(prompt)
        self.index[row], self.order[row], self.made[row], self.place[row] = index, order, 0, prompt.take_place()
        self.prompt_length[row], self.limit[row], self.minimum[row] = len(request.prompt), s.max_tokens, s.min_tokens
        self.seed[row], self.drawn[row] = np.uint64(request.seed & ((1 << 64) - 1)), request.drawn
        self.temperature[row], self.top_k[row], self.top_p[row] = s.temperature, s.top_k, s.top_p
        self.stops[row] = -1
        self.stops[row, : len(s.stop_ids)] = s.stop_ids
        self.own[row] = -1
        self.prompt = _widen(self.prompt, len(prompt.pages), -1)
        self.prompt[row] = -1
        self.prompt[row, : len(prompt.pages)] = prompt.pages
        return row

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> np.ndarray:
        """Record one sampled token for each of `rows`; -> bool, which are finished by a stop id or their limit."""
        at = self.made[rows]
        if len(rows) and at.max() >= self.tokens.shape[1]:
            self.tokens, self.logprobs, self.versions = (
                _widen(x, int(at.max()) + 1, 0) for x in (self.tokens, self.logprobs, self.versions)
            )
            self.routes = None if self.routes is None else _widen(self.routes, int(at.max()) + 1, -1)
        self.tokens[rows, at], self.logprobs[rows, at], self.versions[rows, at] = tokens, logprobs, version
        self.made[rows] += 1
        self.last[rows] = tokens
        return (tokens[:, None] == self.stops[rows]).any(1) | (self.made[rows] >= self.limit[rows])

    def fed(self, rows: np.ndarray, routes_RLk: np.ndarray) -> None:
        """Record the router choices of the last sampled token of each of `rows`, which has been fed to the model."""
        assert self.routes is not None
        self.routes[rows, self.made[rows] - 1] = routes_RLk

    def stopped(self, row: int) -> bool:
        """Whether the row's last token is one of its stop ids."""
        return self.made[row] > 0 and bool((self.stops[row] == self.last[row]).any())

    def banned(self, rows: np.ndarray) -> np.ndarray | None:
        """Stop ids of rows that are below their minimum, -1 elsewhere; None when no row is."""
        early = self.made[rows] < self.minimum[rows]
        return np.where(early[:, None], self.stops[rows], -1) if early.any() else None

    def short_of_pages(self, page_tokens: int) -> np.ndarray:
        """Rows whose next token begins a new page."""
        stored = self.made[: self.count] - 1
        return np.flatnonzero(stored % page_tokens == 0)

    def give_pages(self, rows: np.ndarray, pages: np.ndarray, page_tokens: int) -> None:
        """Append one page to each of `rows`."""
        column = (self.made[rows] - 1) // page_tokens
        self.own = _widen(self.own, int(column.max()) + 1, -1)
        self.own[rows, column] = pages

    def generation(self, row: int, finish: int, request_id: int) -> Generation:
        """What the row has."""
        made = int(self.made[row])
        return Generation(
            self.tokens[row, :made].tolist(),
            self.logprobs[row, :made].tolist(),
            self.versions[row, :made].tolist(),
            finish,
            request_id,
            self._routes_of(row, made),
        )

    def _routes_of(self, row: int, made: int) -> np.ndarray | None:
        """Prompt and response, end to end; of the last token sampled, which was not fed, -1."""
        before = self.prompts[row].routes
        if self.routes is None or before is None:
            return None
        own = self.routes[row, :made].copy()
        own[made - 1 :] = -1
        return np.concatenate([before, own])

    def remove(self, rows: np.ndarray) -> None:
        """Free `rows`; the last rows move into their place."""
        for row in sorted(rows.tolist(), reverse=True):
            self.prompts[row].places.discard(int(self.place[row]))
            last = self.count - 1
            if row != last:
                for array in self._arrays():
                    array[row] = array[last]
                self.prompts[row] = self.prompts[last]
            self.prompts.pop()
            self.count -= 1

    def _arrays(self) -> list[np.ndarray]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def row_pages(self) -> RowPages:
        """Page tables of the rows in use, without columns nobody uses."""
        own, prompt = self.own[: self.count], self.prompt[: self.count]
        lengths = self.made[: self.count], self.prompt_length[: self.count]
        return RowPages(own[:, (own >= 0).any(0)], prompt[:, (prompt >= 0).any(0)], self.place[: self.count], *lengths)

    def pages_of(self, row: int) -> np.ndarray:
        """The sample's own pages."""
        return self.own[row][self.own[row] >= 0]

    def renumber(self, moved: dict[int, int]) -> None:
        """Own pages moved inside the cache."""
        table = np.arange(max(moved) + 1)
        table[list(moved)] = list(moved.values())
        inside = (self.own >= 0) & (self.own < len(table))
        self.own[inside] = table[self.own[inside]]


def _widen(array: np.ndarray, columns: int, fill: int) -> np.ndarray:
    """At least `columns` columns, by doubling."""
    if columns <= array.shape[1]:
        return array
    wide = np.full((len(array), max(columns, 2 * array.shape[1]), *array.shape[2:]), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
