"""Prompts on their way into the dock: one group of rows per prompt, with ids that no restart changes.

Legend: G samples of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, PROMPT, PROMPT_ID, PROMPT_TOKENS, SAMPLE_INDEX
from docklands.data.stream import Prompt, PromptStream


def group_of(prompt: Prompt, group_id: int, samples: int) -> Batch:
    """The G rows of a prompt, as the dock admits them. Row ids follow from the group id, so a repeat is harmless."""
    return Batch(
        np.arange(group_id * samples, (group_id + 1) * samples),
        {
            PROMPT_ID: [prompt.prompt_id] * samples,
            GROUP_ID: [group_id] * samples,
            SAMPLE_INDEX: list(range(samples)),
            PROMPT_TOKENS: [prompt.tokens] * samples,
            PROMPT: (prompt.row,) * samples,
        },
    )


class Prompts:
    """Groups for the dock, from a prompt stream. The position and the next group id are its whole state.

    A group counts as given only once the dock has it (`admitted`): a snapshot taken in between offers it again.
    """

    def __init__(self, stream: PromptStream, samples: int) -> None:
        self._stream = stream
        self._samples = samples
        self._next_group = 0
        self._pending: Batch | None = None
        self._before = stream.state_dict()

    def next_group(self) -> Batch | None:
        """Rows of the next prompt, the same until it is admitted; None when the data is used up."""
        if self._pending is None:
            self._before = self._stream.state_dict()
            found = self._stream.take(1)
            if found:
                self._pending = group_of(found[0], self._next_group, self._samples)
        return self._pending

    def admitted(self) -> None:
        """The dock holds the group that was given last."""
        self._pending = None
        self._next_group += 1

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
