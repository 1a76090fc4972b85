"""Groups enter the dock several at a time, all or none, and the prompts know which the dock has."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.dock_parts import GROUP, PLAIN, ROLLOUT, group, options, rows_of, run

from docklands.core.batch import Batch
from docklands.core.fields import GROUP_ID, PROMPT_ID
from docklands.data.stream import Prompt
from docklands.dock.dock import Dock
from docklands.errors import DockError
from docklands.run.prompts import AT_ONCE, Prompts


def groups(*indices: int) -> Batch:
    return Batch.concat([group(index) for index in indices])


def test_groups_enter_together_or_wait_together() -> None:
    async def main() -> None:
        dock = Dock(PLAIN, options(4, deterministic=False, warehouses=2))
        assert await dock.slots() == 4
        await dock.admit(groups(0, 1, 2))
        assert await dock.slots() == 1
        waits = asyncio.ensure_future(dock.admit(groups(3, 4)))
        await asyncio.sleep(0)
        assert not waits.done() and await dock.slots() == 1
        rows = await dock.take(ROLLOUT, groups=1)
        await dock.drop(rows, "short")
        await asyncio.wait_for(waits, 5)
        taken = await dock.take(ROLLOUT, groups=4)
        assert sorted(taken.row_ids.tolist()) == np.concatenate([rows_of(index) for index in (1, 2, 3, 4)]).tolist()
        assert len(set(taken.places.tolist())) == 2

    run(main())


def test_groups_that_are_here_already_take_no_slot() -> None:
    async def main() -> None:
        dock = Dock(PLAIN, options(3))
        await dock.admit(groups(0, 1))
        await dock.admit(groups(0, 1, 2))
        assert dock._control.ledger.admitted == 3
        with pytest.raises(DockError, match="4 groups at once, at most 3"):
            await dock.admit(groups(2, 3, 4, 5))

    run(main())


class Stream:
    """Prompts 0, 1, 2 ... of a source of so many."""

    config = SimpleNamespace(overlong="error")
    epoch = 0

    def __init__(self, size: int) -> None:
        self.size, self.position = size, 0

    def take(self, count: int) -> list[Prompt]:
        first, self.position = self.position, min(self.size, self.position + count)
        return [Prompt(i, np.arange(i + 1, dtype=np.int32), {"prompt": str(i)}) for i in range(first, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_prompts_are_given_until_the_dock_has_them() -> None:
    prompts = Prompts(Stream(AT_ONCE + 3), GROUP)  # type: ignore[arg-type]
    first = prompts.next_groups(2)
    assert first is not None and prompts.next_groups(9) is first
    assert first.row_ids.tolist() == list(range(2 * GROUP)) and first[GROUP_ID].tolist() == [0] * GROUP + [1] * GROUP
    before = prompts.state_dict()
    prompts.admitted()
    after = prompts.state_dict()
    again = Prompts(Stream(AT_ONCE + 3), GROUP)  # type: ignore[arg-type]
    for state, expected in ((before, 0), (after, 2)):
        again.load_state_dict(state)
        given = again.next_groups(1)
        assert given is not None and given[GROUP_ID].tolist() == given[PROMPT_ID].tolist() == [expected] * GROUP
    many = prompts.next_groups(10 * AT_ONCE)
    assert many is not None and len(many) == AT_ONCE * GROUP
    prompts.admitted()
    last = prompts.next_groups(10)
    assert last is not None and len(last) == GROUP and int(last[GROUP_ID][0]) == AT_ONCE + 2
    prompts.admitted()
    assert prompts.next_groups(10) is None


@pytest.mark.parametrize("left", [(), (0,), (0, 1)])
def test_groups_that_came_in_while_a_checkpoint_was_made_are_not_given_again(left: tuple[int, ...]) -> None:
    """The prompts were asked first: they know of none of the three that the dock holds, or held."""

    async def main() -> None:
        dock = Dock(PLAIN, options(4, deterministic=False))
        await dock.admit(groups(0, 1, 2))
        for _ in left:
            await dock.drop(await dock.take(ROLLOUT, groups=1), "short")
        prompts = Prompts(Stream(9), GROUP)  # type: ignore[arg-type]
        await prompts.rejoin(dock)
        given = prompts.next_groups(1)
        assert given is not None and given[GROUP_ID].tolist() == [3] * GROUP
        assert dock._control.ledger.admitted == 3

    run(main())
