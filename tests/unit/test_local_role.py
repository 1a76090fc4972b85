"""A role of this process reads what the dock lends, and nothing counts that was made of rows which left meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from docklands.core.batch import Batch
from docklands.core.fields import REWARD
from docklands.core.protocols import Rows
from docklands.core.stage import Stage
from docklands.errors import RowGone, WarehouseLost
from docklands.fleet.local_backend import Device, LocalRole

IDS = np.arange(4)
NO = np.zeros(4, np.int64)
ROWS = Rows(IDS, NO, NO, NO, "scale", 1)


class Loan:
    """A batch in memory that is another's by the time it is checked."""

    def __init__(self, gone: bool) -> None:
        self.batch = Batch(IDS, {REWARD: torch.ones(4)})
        self.gone, self.checked = gone, 0

    def check(self) -> None:
        self.checked += 1
        if self.gone:
            raise RowGone("rows were freed while they were read from shared memory")


class Dock:
    """What a role sees of it."""

    def __init__(self, loan: Loan) -> None:
        self.loan, self.written = loan, []

    async def borrow(self, *_: Any) -> Loan:
        return self.loan

    async def put(self, batch: Batch, rows: Rows | None) -> None:
        assert self.loan.checked == 1, "the loan ends before anything is written"
        self.written.append((batch, rows))


def run(loan: Loan, function: Callable[..., Any]) -> list[Any]:
    dock, device = Dock(loan), Device("test")
    stage = Stage("scale", "scale", (REWARD,), (REWARD,), function, "sample")  # type: ignore[arg-type]
    try:
        asyncio.run(LocalRole("scale", None, dock, device).run(stage, ROWS))  # type: ignore[arg-type]
    finally:
        device.close()
    return dock.written


def double(_: Any, batch: Batch) -> Batch:
    return Batch(batch.row_ids, {REWARD: 2 * batch[REWARD]})


def fail(_: Any, batch: Batch) -> Batch:
    raise IndexError("no such token")


def test_a_stage_works_on_what_is_lent() -> None:
    ((batch, rows),) = run(Loan(False), double)
    assert batch[REWARD].tolist() == [2.0] * 4 and rows is ROWS


@pytest.mark.parametrize("function", [double, fail], ids=["made", "failed"])
def test_rows_that_left_meanwhile_are_given_back(function: Callable[..., Any]) -> None:
    """Also where the stage failed: it may have read another's bytes. The pump gives the rows back."""
    loan = Loan(True)
    with pytest.raises(WarehouseLost, match="freed while they were read"):
        run(loan, function)
    assert loan.checked == 1


async def cancelled(_: Any, batch: Batch) -> Batch:
    raise asyncio.CancelledError


def test_a_cancelled_stage_is_cancelled_whatever_became_of_its_rows() -> None:
    """A pump that heard of lost rows instead would give them back, and go on for ever."""
    with pytest.raises(asyncio.CancelledError):
        run(Loan(True), cancelled)


def test_a_stage_that_fails_on_its_own_says_so() -> None:
    with pytest.raises(IndexError, match="no such token"):
        run(Loan(False), fail)
