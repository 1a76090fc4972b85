"""The critical path of steps, from spans made by hand: what it waits for, what it leaves out, what overlaps."""

from __future__ import annotations

from typing import Any

import pytest

from docklands.obs.critical_path import Places, StepPath, critical_path, parsed, ranges

STAGES = [
    {"name": "rollout", "reads": ["prompt"], "writes": ["tokens"]},
    {"name": "reward", "reads": ["tokens"], "writes": ["reward"]},
    {"name": "ref_logprobs", "reads": ["tokens"], "writes": ["ref"]},
    {"name": "update", "reads": ["tokens", "reward", "ref"], "writes": []},
]


class Spans:
    """Spans of a run, as read_spans gives them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def work(self, name: str, role: str, begin: float, end: float, groups: str = "", **more: Any) -> None:
        row = {"name": name, "role": role, "rank": 0, "id": len(self.rows), "parent": None, "step": 0, "start": begin}
        attributes = {"groups": groups} | {key: more.pop(key) for key in ("after",) if key in more}
        self.rows.append({**row, "duration": end - begin, "attributes": attributes, **more})

    def publish(self, begin: float, end: float, step: int | None) -> None:
        self.work("publish", "actor", begin, end, step=step)

    def paths(self, **places: Any) -> list[StepPath]:
        rows = sorted(self.rows, key=lambda row: row["start"])
        return critical_path(rows, STAGES, Places(**{"prompts": 2, **places}))


def a_step() -> Spans:
    """rollout 4 s; reward 1 s beside ref 2 s; update 3 s; publish 1 s; half a second lies idle before the update."""
    spans = Spans()
    spans.publish(0.0, 1.0, None)
    spans.work("stage/rollout", "rollout", 1.0, 5.0, "0-1")
    spans.work("stage/reward", "reward", 5.0, 6.0, "0-1")
    spans.work("stage/ref_logprobs", "reference", 5.0, 7.0, "0-1")
    spans.work("update/actor", "actor", 7.5, 10.5, "0-1")
    spans.publish(10.5, 11.5, 0)
    return spans


def test_the_path_is_the_longest_chain_and_leaves_out_what_lay_idle() -> None:
    (step,) = a_step().paths()
    path = {"rollout": 4.0, "ref_logprobs": 2.0, "update": 3.0, "publish": 1.0}
    assert step == StepPath(1, 10.5, 10.0, path, {**dict.fromkeys(path, 0.0), "update": 0.5})


def test_work_is_what_the_slowest_worker_was_busy_with() -> None:
    spans = a_step()
    for rank, seconds in ((0, 2.0), (1, 3.5)):
        spans.work("rollout/run_stage", "worker", 1.2, 1.2 + seconds, rank=rank)
    spans.work("gate/check", "worker", 1.2, 5.0, parent=7)  # nested: part of a call, no call
    (step,) = spans.paths()
    assert step.path_s == pytest.approx(9.5) and step.by_stage["rollout"] == pytest.approx(3.5)
    assert step.idle["rollout"] == pytest.approx(0.5)


def test_a_wait_for_the_device_is_no_work_of_the_span_that_waits() -> None:
    spans = a_step()
    spans.rows = [row for row in spans.rows if row["name"] != "update/actor"]
    spans.work("update/actor", "actor", 6.0, 10.5, "0-1", after=1.5)
    assert spans.paths()[0].path_s == pytest.approx(10.0)


def test_rows_wait_for_their_own_groups_only() -> None:
    spans = Spans()
    spans.publish(0.0, 1.0, None)
    spans.work("stage/rollout", "rollout", 1.0, 3.0, "0")
    spans.work("stage/reward", "reward", 3.0, 7.0, "0")
    spans.work("stage/rollout", "rollout", 3.0, 5.0, "1")
    spans.work("stage/reward", "reward", 7.0, 8.0, "1")  # waits for its device, not for rows
    spans.work("update/actor", "actor", 8.0, 9.0, "0-1")
    spans.publish(9.0, 10.0, 0)
    assert spans.paths()[0].path_s == pytest.approx(2 + 4 + 1 + 1 + 1)
    assert "rollout" in spans.paths()[0].by_stage


def test_rows_that_were_there_before_their_maker_was_done_count_from_then() -> None:
    spans = a_step()
    spans.rows = [{**row, "start": 4.8, "duration": 2.2} if "ref" in row["name"] else row for row in spans.rows]
    assert spans.paths()[0].path_s <= 10.5


def async_steps(late: float) -> Spans:
    """Generators apart, one step ahead: rollout 4 s beside update 2 s and publish 1 s; the second begins `late`."""
    spans = Spans()
    spans.publish(0.0, 1.0, None)
    spans.work("stage/rollout", "rollout", 1.0, 5.0, "0-1")
    spans.work("stage/rollout", "rollout", 5.0 + late, 9.0 + late, "2-3")
    spans.work("update/actor", "actor", 5.0, 7.0, "0-1")
    spans.publish(9.0 + late, 10.0 + late, 0)
    spans.work("update/actor", "actor", 10.0 + late, 12.0 + late, "2-3", step=1)
    spans.publish(12.0 + late, 13.0 + late, 1)
    return spans


def test_generators_apart_work_beside_the_trainers() -> None:
    first, second = async_steps(0.0).paths(staleness=1, apart=True)
    assert (first.path_s, second.path_s) == (9.0, 3.0)
    late, _ = async_steps(1.5).paths(staleness=1, apart=True)
    assert late.seconds == 10.5 and late.path_s == 9.0, "that a generator lay idle is no work"


def test_without_staleness_a_slot_comes_with_the_publish() -> None:
    spans = a_step()
    spans.work("stage/rollout", "rollout", 12.0, 13.0, "2-3", step=1)
    spans.work("update/actor", "actor", 13.0, 14.0, "2-3", step=1)
    spans.publish(14.0, 15.0, 1)
    for apart in (False, True):
        assert [path.path_s for path in spans.paths(apart=apart)] == [10.0, 3.0]


def test_spans_of_a_run_that_tells_no_groups_have_no_path() -> None:
    spans = a_step()
    for row in spans.rows:
        row["attributes"] = {"rows": 8}
    assert spans.paths() == [] and Spans().paths() == []


@pytest.mark.parametrize("groups", [[], [3], [1, 0, 2, 7, 9, 8, 8], [5, 3]])
def test_groups_are_written_and_read_back(groups: list[int]) -> None:
    assert parsed(ranges(groups)) == set(groups)


def test_groups_in_few_words() -> None:
    assert ranges(range(4096)) == "0-4095" and ranges([2, 0, 1, 9]) == "0-2 9"
    assert parsed("of 3-x") == frozenset()
