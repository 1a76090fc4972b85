"""What a trained batch looked like: metrics, and the sample records for people. Runs where the rows are, as a stage.

Legend: B samples, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from docklands.core.batch import Batch, Jagged, offsets_of
from docklands.core.fields import (
    ADVANTAGE,
    COMPLETION,
    FINISH_NAMES,
    FINISH_REASON,
    GROUP_ID,
    LOSS_MASK,
    OLD_LOGPROBS,
    PROMPT,
    PROMPT_ID,
    REF_LOGPROBS,
    RETURNS,
    REWARD,
    ROLLOUT_LOGPROBS,
    SHAPED_REWARD,
    TOKEN_ADVANTAGES,
    TOKEN_IDS,
    VALUES,
    WEIGHT_VERSIONS,
    Field,
)
from docklands.core.graph import Graph
from docklands.core.stage import Result, Stage

SumCount = dict[str, tuple[float, float]]

WANTED: tuple[Field[Any], ...] = (
    PROMPT_ID,
    GROUP_ID,
    PROMPT,
    COMPLETION,
    TOKEN_IDS,
    LOSS_MASK,
    FINISH_REASON,
    WEIGHT_VERSIONS,
    ROLLOUT_LOGPROBS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    REWARD,
    SHAPED_REWARD,
    ADVANTAGE,
    TOKEN_ADVANTAGES,
    RETURNS,
    VALUES,
)


def describe_stage(graph: Graph, role: str) -> Stage:
    """A stage outside the graph that reads what the graph has and writes only metrics."""
    reads = tuple(field for field in WANTED if field in graph.fields)
    return Stage("describe", role, reads, (), describe, by="step")


def describe(recorder: Any, batch: Batch) -> Result:
    """Metrics of a step's batch; hands the batch to `recorder.record(batch)` for the sample files."""
    metrics: SumCount = {}
    lengths(metrics, batch)
    scores(metrics, batch)
    mismatch(metrics, batch)
    counts(metrics, batch, recorder.version)
    recorder.record(batch)
    return Result(metrics=metrics)


def spread(metrics: SumCount, name: str, values: np.ndarray | torch.Tensor) -> None:
    """name/mean, name/max, name/min of a flat array; nothing for an empty one."""
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size:
        metrics[f"{name}/mean"] = (float(array.sum()), float(array.size))
        metrics[f"{name}/max"] = (float(array.max()), 1.0)
        metrics[f"{name}/min"] = (float(array.min()), 1.0)


def lengths(metrics: SumCount, batch: Batch) -> None:
    """Prompt and response lengths in tokens; the response is everything from the first sampled token on."""
    mask: Jagged = batch[LOSS_MASK]
    total_B = batch.lengths
    prompt_B = first_sampled(mask)
    spread(metrics, "prompt_length", prompt_B)
    spread(metrics, "response_length", total_B - prompt_B)
    metrics["perf/total_num_tokens"] = (float(total_B.sum()), 1.0)
    if FINISH_REASON in batch:
        cut = [FINISH_NAMES[int(f)] == "length" for f in batch[FINISH_REASON]]
        metrics["response_length/clip_ratio"] = (float(sum(cut)), float(len(cut)))
        metrics["completions/clipped_ratio"] = metrics["response_length/clip_ratio"]
        aborted = [FINISH_NAMES[int(f)] == "abort" for f in batch[FINISH_REASON]]
        metrics["completions/aborted_ratio"] = (float(sum(aborted)), float(len(aborted)))
        metrics["completions/empty_ratio"] = (float((total_B == prompt_B).sum()), float(len(total_B)))


def first_sampled(mask: Jagged) -> np.ndarray:
    """Position of each row's first sampled token, its length if there is none; int64 [B]."""
    sampled = np.append(np.flatnonzero(mask.values.numpy()), mask.offsets[-1])
    first = sampled[np.searchsorted(sampled, mask.offsets[:-1])]  # in this row or, if it has none, in a later one
    return np.minimum(first, mask.offsets[1:]) - mask.offsets[:-1]


def scores(metrics: SumCount, batch: Batch) -> None:
    """Rewards, advantages, values; how many groups are all equal."""
    if REWARD in batch:
        reward_B = batch[REWARD].numpy()
        spread(metrics, "critic/score", reward_B)
        groups = batch[GROUP_ID].numpy()
        order = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
        by_group = reward_B[order]
        widths = (
            np.maximum.reduceat(by_group, starts) - np.minimum.reduceat(by_group, starts) if len(starts) else starts
        )
        metrics["frac_reward_zero_std"] = (float(np.count_nonzero(widths < 1e-8)), float(len(starts)))
    if SHAPED_REWARD in batch:
        spread(metrics, "critic/rewards", batch[SHAPED_REWARD])
    if ADVANTAGE in batch:
        spread(metrics, "critic/advantages", batch[ADVANTAGE])
    mask_T = batch[LOSS_MASK].values
    for field, name in (
        (TOKEN_ADVANTAGES, "critic/advantages"),
        (RETURNS, "critic/returns"),
        (VALUES, "critic/values"),
    ):
        if field in batch:
            spread(metrics, name, batch[field].values[mask_T])


def counts(metrics: SumCount, batch: Batch, version: int) -> None:
    """How many samples the step trains, and how many versions lie between a sample's oldest token and `version`."""
    metrics["training/samples"] = (float(len(batch)), 1.0)
    metrics["training/groups"] = (float(len(np.unique(batch[GROUP_ID].numpy()))), 1.0)
    if WEIGHT_VERSIONS in batch:
        mask: Jagged = batch[LOSS_MASK]
        mask_T = mask.values.numpy().astype(bool)
        sampled_B = np.diff(offsets_of(mask_T)[mask.offsets])
        starts = offsets_of(sampled_B)[:-1][sampled_B > 0]
        if len(starts):
            oldest = np.minimum.reduceat(batch[WEIGHT_VERSIONS].values.numpy()[mask_T], starts)
            spread(metrics, "training/staleness", version - oldest.astype(np.int64))


def mismatch(metrics: SumCount, batch: Batch) -> None:
    """|p_trainer - p_rollout| of the sampled tokens, where the trainer's log-probs are at hand."""
    if OLD_LOGPROBS not in batch or ROLLOUT_LOGPROBS not in batch:
        return
    mask_T = batch[LOSS_MASK].values.numpy().astype(bool)
    old_T, mu_T = (batch[field].values.float().numpy()[mask_T] for field in (OLD_LOGPROBS, ROLLOUT_LOGPROBS))
    gap_T = np.abs(np.exp(old_T) - np.exp(mu_T))
    if gap_T.size:
        metrics["training/rollout_probs_diff_mean"] = (float(gap_T.sum(dtype=np.float64)), float(gap_T.size))
        metrics["training/rollout_probs_diff_max"] = (float(gap_T.max()), 1.0)


class SampleRecorder:
    """Turns the first `most` rows of a step into records for samples/step_*.jsonl.

    tokens   response tokens of a sample that are told one by one; needs `piece`, a token id's text
    version  of the weights that the step's updates start from
    """

    def __init__(self, most: int, tokens: int = 0, piece: Callable[[int], str] | None = None) -> None:
        self._most = most
        self._tokens, self._piece = tokens, piece
        self._records: list[dict[str, Any]] = []
        self.version = 0

    def record(self, batch: Batch) -> None:
        self._records = [sample_record(batch, i) for i in range(min(self._most, len(batch)))]
        if self._tokens and self._piece is not None:
            for i, record in enumerate(self._records):
                record["tokens"] = token_record(batch, i, self._tokens, self._piece)

    def take(self) -> list[dict[str, Any]]:
        records, self._records = self._records, []
        return records


def sample_record(batch: Batch, i: int) -> dict[str, Any]:
    """One row as JSON."""
    record: dict[str, Any] = {
        "row_id": int(batch.row_ids[i]),
        "group_id": int(batch[GROUP_ID][i]),
        "prompt_id": int(batch[PROMPT_ID][i]),
        "prompt": prompt_text(batch[PROMPT][i]),
        "response_tokens": int(batch[LOSS_MASK][i].sum()),
    }
    if COMPLETION in batch:
        record["completion"] = batch[COMPLETION][i]
    if FINISH_REASON in batch:
        record["finish"] = FINISH_NAMES[int(batch[FINISH_REASON][i])]
    if REWARD in batch:
        record["reward"] = round(float(batch[REWARD][i]), 6)
    if ADVANTAGE in batch:
        record["advantage"] = round(float(batch[ADVANTAGE][i]), 6)
    if WEIGHT_VERSIONS in batch:
        sampled = batch[WEIGHT_VERSIONS][i][batch[LOSS_MASK][i]]
        record["versions"] = [int(sampled.min()), int(sampled.max())] if len(sampled) else []
    return record


def prompt_text(row: Any) -> str:
    """A data row's prompt as text for people: the text, or the last message."""
    prompt = row.get("prompt", row) if isinstance(row, dict) else row
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content", ""))
    return str(prompt)


TOKEN_COLUMNS = {"rollout": ROLLOUT_LOGPROBS, "old": OLD_LOGPROBS, "ref": REF_LOGPROBS, "advantage": TOKEN_ADVANTAGES}


def token_record(batch: Batch, i: int, most: int, piece: Callable[[int], str]) -> dict[str, Any]:
    """The first `most` tokens of a row's response, as lists of equal length.

    text                             of each token
    mask                             a string of 0 and 1: 1 where the policy sampled the token
    versions                         weight version of each token as [version, how many in a row]
    rollout, old, ref, advantage     log-probs in nats and advantages, to 4 digits, where the graph has the column
    all                              tokens of the whole response
    """
    mask_T = batch[LOSS_MASK][i].bool()
    first = int(mask_T.int().argmax()) if bool(mask_T.any()) else len(mask_T)
    chosen = slice(first, first + most)
    record: dict[str, Any] = {
        "text": [piece(int(token)) for token in batch[TOKEN_IDS][i][chosen]],
        "mask": "".join("1" if kept else "0" for kept in mask_T[chosen].tolist()),
        "all": len(mask_T) - first,
    }
    if WEIGHT_VERSIONS in batch:
        record["versions"] = [[v, len(list(run))] for v, run in groupby(batch[WEIGHT_VERSIONS][i][chosen].tolist())]
    for name, field in TOKEN_COLUMNS.items():
        if field in batch:
            record[name] = [round(float(value), 4) for value in batch[field][i][chosen]]
    return record
