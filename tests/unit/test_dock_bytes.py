"""The bytes: what is stored, how it comes back, what is refused, capacity."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tests.dock_parts import (
    ADVANTAGE_STAGE,
    GROUP,
    LEARNER,
    PLAIN,
    REF,
    REWARD_STAGE,
    ROLLOUT,
    UPDATE,
    group,
    options,
    rows_of,
    run,
    stage,
    started,
    work,
    written,
)

from docklands.core.batch import Batch
from docklands.core.fields import (
    COMPLETION,
    GROUP_ID,
    LOSS_MASK,
    PROMPT,
    PROMPT_TOKENS,
    REF_LOGPROBS,
    REWARD,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
    VALUES,
    Field,
)
from docklands.core.graph import Graph
from docklands.core.protocols import Outcome
from docklands.dock import Dock
from docklands.errors import DockError, GraphError, RowGone, TakeTimeout, UnknownField

ROUTES = Field("routes", "uint8", ("T", 3, 2), "a per-token column with trailing dimensions")
LATENTS = Field("latents", "bfloat16", ("*", 2), "a ragged column of its own length")
SCALES = Field("scales", "float8_e4m3fn", (4,), "a regular column")
WIDE = Graph(
    (
        stage("rollout", (PROMPT_TOKENS,), (TOKEN_IDS, LOSS_MASK, ROUTES, LATENTS, SCALES)),
        stage("update", (TOKEN_IDS, LOSS_MASK, ROUTES, LATENTS, SCALES), (), "step"),
    ),
    (LEARNER.__class__("actor", "actor", (TOKEN_IDS, LOSS_MASK, ROUTES, LATENTS, SCALES), LEARNER.loss),),
)


def wide_columns(row_ids: np.ndarray) -> dict[Field, list[torch.Tensor]]:
    made: dict[Field, list[torch.Tensor]] = {field: [] for field in WIDE["rollout"].writes}
    for row in row_ids.tolist():
        rng = torch.Generator().manual_seed(row)
        tokens = int(torch.randint(0, 5, (1,), generator=rng))
        made[TOKEN_IDS].append(torch.randint(0, 99, (tokens,), generator=rng).int())
        made[LOSS_MASK].append(torch.randint(0, 2, (tokens,), generator=rng).bool())
        made[ROUTES].append(torch.randint(0, 255, (tokens, 3, 2), generator=rng).to(torch.uint8))
        made[LATENTS].append(torch.randn(tokens + 1, 2, generator=rng).bfloat16())
        made[SCALES].append(torch.randn(4, generator=rng).to(torch.float8_e4m3fn))
    return made


@pytest.mark.parametrize("warehouses", [1, 3])
def test_any_dtype_and_trailing_shape_comes_back_bit_for_bit(warehouses):
    """R7: bfloat16, fp8, per-token columns with trailing dimensions, rows of no token; over warehouses; any order."""

    async def main():
        dock = Dock(WIDE, options(4, warehouses=warehouses))
        for index in range(4):
            await dock.admit(group(index))
        rows = await dock.take(WIDE["rollout"])
        for part in (np.array([3, 0, 9]), np.array([1, 2, 4, 5, 6, 7, 8]), np.arange(10, 16)):
            ids = rows.row_ids[part]
            made = wide_columns(ids)
            await dock.put(Batch(ids, {**made, SCALES: torch.stack(made[SCALES])}))
        await dock.finish(rows, Outcome())
        rows = (await dock.take(WIDE["update"])).select(np.random.default_rng(0).permutation(16))
        batch = await dock.fetch(rows, WIDE["update"].reads)
        assert batch.row_ids.tolist() == rows.row_ids.tolist()
        for field, expected in wide_columns(rows.row_ids).items():
            for got, want in zip(batch[field], expected):
                assert got.dtype == want.dtype and got.shape == want.shape
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        empty = await dock.fetch(rows.select(np.array([], np.int64)), WIDE["update"].reads)
        assert len(empty) == 0 and empty[ROUTES].values.shape == (0, 3, 2)

    run(main())


def test_a_fetch_of_neighbours_is_a_view_of_what_was_put():
    async def main():
        dock = Dock(PLAIN, options(2))
        await dock.admit(group(0))
        await dock.admit(group(1))
        rows = await dock.take(ROLLOUT)
        batch = written(ROLLOUT, rows.row_ids)
        await dock.put(batch)
        whole = await dock.fetch(rows, [ROLLOUT_LOGPROBS])
        part = await dock.fetch(rows.select(np.array([2, 3])), [ROLLOUT_LOGPROBS])
        start = batch[ROLLOUT_LOGPROBS].values.data_ptr()
        assert whole[ROLLOUT_LOGPROBS].values.data_ptr() == start
        assert part[ROLLOUT_LOGPROBS].values.data_ptr() == start + 4 * int(batch[ROLLOUT_LOGPROBS].offsets[2])
        assert part[ROLLOUT_LOGPROBS].lengths.tolist() == [3, 4]

    run(main())


def test_a_stored_column_does_not_hold_on_to_a_larger_tensor_or_a_graph():
    async def main():
        dock = await started()
        big = torch.zeros(1_000_000, requires_grad=True)
        rows = await dock.take(REWARD_STAGE)
        await dock.put(Batch(rows.row_ids, {REWARD: big[: len(rows)] * 1.0}))
        await dock.finish(rows, Outcome())
        got = (await dock.fetch(rows, [REWARD]))[REWARD]
        assert not got.requires_grad and got.untyped_storage().nbytes() == 4 * len(rows)

    run(main())


def test_fetch_names_row_column_and_writer_of_what_is_absent():
    async def main():
        dock = await started()
        rows = await dock.take(REF)
        with pytest.raises(UnknownField, match=r"row 0 has no reward yet \(8 of 8 rows.*'reward' writes it"):
            await dock.fetch(rows, [TOKEN_IDS, REWARD])
        with pytest.raises(UnknownField, match="no stage of the graph declares the column 'values'"):
            await dock.fetch(rows, [VALUES])
        await dock.drop(await dock.take(REWARD_STAGE), "error")
        await work(dock, REF, rows)
        with pytest.raises(RowGone, match="fetch of rows that are not in the dock: 0, 1, 2"):
            await dock.fetch(rows, [TOKEN_IDS])

    run(main())


def test_puts_that_cannot_be_right_are_refused_and_change_nothing():
    async def main():
        dock = await started()
        before = dock.stats()["dock/bytes"]
        ids = rows_of(0)
        with pytest.raises(UnknownField, match="declares the column 'reward_'.*did you mean 'reward'"):
            await dock.put(Batch(ids, {Field("reward_", "float32"): torch.zeros(4)}))
        with pytest.raises(UnknownField, match="reward:float64.* is declared as reward:float32"):
            await dock.put(Batch(ids, {Field("reward", "float64"): torch.zeros(4)}))
        with pytest.raises(RowGone, match="put to rows that are not in the dock: 99"):
            await dock.put(Batch([0, 99], {REWARD: torch.zeros(2)}))
        with pytest.raises(DockError, match="names a row twice"):
            await dock.put(Batch([0, 0], {REWARD: torch.zeros(2)}))
        with pytest.raises(DockError, match="column ref_logprobs has 2 tokens in row 0, token_ids has 1"):
            await dock.put(Batch([0], {REF_LOGPROBS: [[0.0, 0.0]]}))
        assert dock.stats()["dock/bytes"] == before

    run(main())


def test_a_stage_writes_its_columns_of_a_row_at_once_and_before_it_is_done():
    async def main():
        dock = Dock(PLAIN, options(1))
        await dock.admit(group(0))
        rows = await dock.take(ROLLOUT)
        full = written(ROLLOUT, rows.row_ids)
        with pytest.raises(
            DockError, match="'rollout' wrote token_ids, loss_mask without rollout_logprobs, completion"
        ):
            await dock.put(full.only((TOKEN_IDS, LOSS_MASK)))
        with pytest.raises(DockError, match="value is not JSON"):
            await dock.put(full.with_({COMPLETION: [object()] * 4}))
        await dock.put(full.select(np.array([0, 1])))
        with pytest.raises(DockError, match="finished rows without writing token_ids: 2, 3"):
            await dock.finish(rows, Outcome())
        await dock.finish(rows, Outcome({2: "aborted", 3: "aborted"}))
        await dock.put(full.select(np.array([0, 1])).with_({PROMPT: [1, 2]}))  # all there already: passed over
        assert dock.stats()["dock/ignored_puts"] == 10

    run(main())


def test_acknowledgements_that_cannot_be_right_are_refused():
    async def main():
        dock = await started()
        await work(dock, REWARD_STAGE, await dock.take(REWARD_STAGE))
        rows = await dock.take(ADVANTAGE_STAGE)
        await dock.put(written(ADVANTAGE_STAGE, rows.row_ids))
        with pytest.raises(DockError, match="dropped rows that it was not given: 77"):
            await dock.finish(rows, Outcome({77: "?"}))
        with pytest.raises(DockError, match="'advantage' finished a part of group 0"):
            await dock.finish(rows.select(np.array([0, 1])), Outcome())
        await dock.finish(rows.select(np.arange(GROUP)), Outcome())
        assert dock.stats()["dock/advantage/leased"] == GROUP
        strange = rows.__class__(rows.row_ids, rows.group_ids, rows.lengths, rows.places, "advantage", 55)
        with pytest.raises(DockError, match="never gave out the lease 55"):
            await dock.finish(strange, Outcome())
        with pytest.raises(GraphError, match="no stage 'updat'.*did you mean 'update'"):
            await dock.take(stage("updat", (REWARD,), ()))

    run(main())


def test_admissions_that_are_not_one_whole_group_are_refused():
    async def main():
        dock = Dock(PLAIN, options(2))
        good = group(0)
        with pytest.raises(DockError, match="3 different rows, group_size is 4"):
            await dock.admit(good.select(np.arange(3)))
        with pytest.raises(DockError, match="one group at a time"):
            await dock.admit(good.with_({GROUP_ID: [0, 0, 0, 1]}))
        with pytest.raises(UnknownField, match="wrong columns: prompt"):
            await dock.admit(good.only([f for f in good.fields if f.name != "prompt"]))
        await dock.admit(good)
        with pytest.raises(DockError, match="group 0 is in flight with other rows"):
            await dock.admit(group(1).with_({GROUP_ID: [0] * 4}))
        with pytest.raises(DockError, match="4 of its rows are in flight"):
            await dock.admit(good.with_({GROUP_ID: [9] * 4}))
        await dock.end_of_prompts()
        assert await dock.slots() == 0
        with pytest.raises(DockError, match="after the end of prompts"):
            await dock.admit(group(1))
        assert dock.stats()["dock/in_flight"] == 1

    run(main())


def test_producers_wait_for_room_and_go_on_when_rows_retire():
    """One group's worth and a little more: the next group waits although its slot is free, then comes in whole."""

    async def main():
        need = int((await started(groups=1)).stats()["dock/bytes"])
        dock = await started(groups=1, max_staleness=1, capacity_bytes=need + 120)
        assert await dock.slots()
        second = asyncio.ensure_future(dock.admit(group(1)))
        for name in ("reward", "ref", "advantage"):
            await work(dock, dock.graph[name], await dock.take(dock.graph[name]))
        rows = await dock.take(UPDATE)
        await asyncio.sleep(0.01)
        assert not second.done()
        assert need < dock.stats()["dock/bytes"] <= need + 120
        await dock.retire(rows)
        await second
        assert dock.stats()["dock/in_flight"] == 1

    run(main())


def test_a_put_waits_for_room_until_its_deadline_and_is_whole_or_absent():
    async def main():
        dock = Dock(PLAIN, options(1, capacity_bytes=600, wait_s=0.05))
        await dock.admit(group(0))
        used = dock.stats()["dock/bytes"]
        rows = await dock.take(ROLLOUT)
        texts = [f"{'x' * 150}{row}" for row in rows.row_ids]
        big = written(ROLLOUT, rows.row_ids).with_({COMPLETION: texts})
        with pytest.raises(DockError, match="one put of .* bytes is larger than warehouse 0, which holds 600 bytes"):
            await dock.put(big)
        small = written(ROLLOUT, rows.row_ids).with_({COMPLETION: [text[80:] for text in texts]})
        with pytest.raises(TakeTimeout, match=rf"put waited .*warehouse 0 holds {int(used)} of 600 bytes"):
            await dock.put(small)
        assert dock.stats()["dock/bytes"] == used

    run(main())


def test_a_waiting_put_ends_quietly_when_the_dock_closes():
    async def main():
        dock = Dock(PLAIN, options(1, capacity_bytes=600))
        await dock.admit(group(0))
        rows = await dock.take(ROLLOUT)
        batch = written(ROLLOUT, rows.row_ids).with_({COMPLETION: ["x" * 70] * 4})
        put = asyncio.ensure_future(dock.put(batch))
        await asyncio.sleep(0.01)
        assert not put.done()
        await dock.close()
        await asyncio.wait_for(put, 1.0)

    run(main())
