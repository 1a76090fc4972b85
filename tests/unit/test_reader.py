"""What a rank writes is its own, even if it is what it has read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from docklands.core.batch import Batch, Jagged
from docklands.core.fields import PROMPT, REF_LOGPROBS, REWARD, ROLLOUT_LOGPROBS, TOKEN_IDS
from docklands.core.protocols import Rows
from docklands.fleet.host import Context, Setup
from docklands.fleet.reader import Reader, own
from docklands.parallel.layout import Layout

IDS = np.arange(2)
OFFSETS = np.array([0, 2, 5])


def test_columns_that_were_handed_on_are_copied_and_no_others() -> None:
    tokens = torch.arange(12, dtype=torch.int32)
    lent = Batch(IDS, {TOKEN_IDS: Jagged(tokens[3:8], OFFSETS), REWARD: torch.ones(2), PROMPT: ("a", "b")})
    alike = torch.from_numpy(lent[TOKEN_IDS].values.numpy()).view(torch.float32)
    made = {REF_LOGPROBS: Jagged(alike, OFFSETS), ROLLOUT_LOGPROBS: Jagged(torch.zeros(5), OFFSETS), PROMPT: ("a", "b")}
    batch = Batch(IDS, made)
    found = own(batch, lent)
    tokens.fill_(9)
    assert found[REF_LOGPROBS].values.view(torch.int32).tolist() == [3, 4, 5, 6, 7]
    assert found[ROLLOUT_LOGPROBS] is batch[ROLLOUT_LOGPROBS] and found[PROMPT] == ("a", "b")
    assert own(found, lent) is found


class Dock:
    """Lends a tensor that is overwritten once the loan has ended."""

    def __init__(self) -> None:
        self.values, self.put_down = torch.ones(2), torch.empty(0)
        self.batch = Batch(IDS, {REWARD: self.values})

    def borrow(self, *_: Any) -> Any:
        return self

    def check(self) -> None:
        self.values.fill_(7)

    def put(self, batch: Batch, _: Rows | None) -> None:
        self.put_down = batch[REWARD].clone()


def test_a_reader_writes_what_was_made_before_the_loan_ended() -> None:
    dock = Dock()
    context = Context(Setup(Layout(), wait_s=1.0), 0, "cpu", client=dock)  # type: ignore[arg-type]
    reader = Reader(context, None, None)
    rows = Rows(IDS, IDS, IDS, IDS, "scale", 1)
    batch = reader.fetch_alone(rows, (REWARD,), lend=True)
    assert reader.put_alone(Batch(IDS, {REWARD: batch[REWARD]}), rows) is None
    assert dock.put_down.tolist() == [1.0, 1.0] and dock.values.tolist() == [7.0, 7.0]
