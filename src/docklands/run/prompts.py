"""Prompts on their way into the dock: one group of rows per prompt, with ids that no restart changes.

Legend: N prompts, G samples of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, PROMPT, PROMPT_ID, PROMPT_TOKENS, SAMPLE_INDEX
from docklands.data.stream import Prompt, PromptStream

if TYPE_CHECKING:
    from docklands.core.protocols import Dock

AT_ONCE = 64
"""Groups that enter the dock in one call: it has room for all of them, or for none."""


def groups_of(prompts: Sequence[Prompt], first: int, samples: int) -> Batch:
    """The N G rows of prompts, as the dock admits them. Groups have ids from `first` on; row ids follow from them, so a
    repeat is harmless.
    """
    rows = [(prompt, group) for group, prompt in enumerate(prompts, first) for _ in range(samples)]
    return Batch(
        np.arange(first * samples, first * samples + len(rows)),
        {
            PROMPT_ID: [prompt.prompt_id for prompt, _ in rows],
            GROUP_ID: [group for _, group in rows],
            SAMPLE_INDEX: list(range(samples)) * len(prompts),
            PROMPT_TOKENS: [prompt.tokens for prompt, _ in rows],
            PROMPT: tuple(prompt.row for prompt, _ in rows),
        },
    )


class Prompts:
    """Groups for the dock, from a prompt stream. The position and the next group id are its whole state.

    Groups count as given only once the dock has them (`admitted`): a snapshot taken in between offers them again.
    """

    def __init__(self, stream: PromptStream, samples: int) -> None:
        self._stream = stream
        self._samples = samples
        self._next_group = 0
        self._given = 0
        self._pending: Batch | None = None
        self._before = stream.state_dict()

    def next_groups(self, most: int) -> Batch | None:
        """Rows of the next prompts, the same until they are admitted; None when the data is used up."""
        if self._pending is None:
            self._before = self._stream.state_dict()
            found = self._stream.take(min(most, AT_ONCE))
            if found:
                self._given = len(found)
                self._pending = groups_of(found, self._next_group, self._samples)
        return self._pending

    def admitted(self) -> None:
        """The dock holds the groups that were given last."""
        self._pending = None
        self._next_group += self._given

    async def rejoin(self, dock: Dock) -> None:
        """After a resume: groups that came into the dock while the checkpoint was made, and so count as not given. What
        their warehouse may not have got comes again, and they are not given a second time, when they have left.
        """
        while (groups := self.next_groups(AT_ONCE)) is not None:
            there = (await dock.here(groups.row_ids)).reshape(self._given, -1).any(1)
            last = int(np.flatnonzero(there)[-1]) + 1 if there.any() else 0
            if last:
                await dock.admit(groups.select(np.repeat(there, self._samples)))
            whole = last == self._given
            self._stream.load_state_dict(self._before)
            self._stream.take(last)
            self._given = last
            self.admitted()
            if not whole:
                return

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt."""
        return self._stream.epoch

    @property
    def overlong(self) -> dict[str, float]:
        """Prompts left out or cut because of their length, since the start; nothing where that is an error."""
        if self._stream.config.overlong == "error":
            return {}
        return {"data/overlong_dropped": self._stream.dropped, "data/overlong_truncated": self._stream.truncated}

    def state_dict(self) -> dict[str, Any]:
        stream = self._stream.state_dict() if self._pending is None else self._before
        return {"stream": stream, "next_group": self._next_group}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state["stream"])
        self._next_group = int(state["next_group"])
        self._pending = None
