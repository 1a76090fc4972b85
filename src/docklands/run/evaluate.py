"""Held-out evaluation: mean@N, best@N, maj@N, pass@k, with bootstrap intervals over prompts.

Legend: P prompts, N samples per prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

from docklands.core.batch import Batch
from docklands.core.fields import (
    COMPLETION,
    FINISH_NAMES,
    FINISH_REASON,
    GROUP_ID,
    LOSS_MASK,
    PROMPT,
    PROMPT_ID,
    REWARD,
    REWARD_INFO,
    SAMPLE_INDEX,
)
from docklands.core.protocols import Sampling
from docklands.run.describe import prompt_text


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating LLMs Trained on Code", eq. 1)."""
    if not 0 < k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, there are {samples}")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def bootstrap_interval(
    values: Sequence[float], seed: int = 0, draws: int = 2000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of the mean, resampling prompts."""
    array = np.asarray(values, np.float64)
    if array.size == 0:
        return (float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    means = array[rng.integers(0, array.size, (draws, array.size))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def roll_out(worker: Any, batch: Batch, sampling: Sampling) -> Batch:
    """Generate for `batch` (admitted columns): its rows that came through, in order, with the written columns added."""
    rolled = worker.rollout(batch, sampling=sampling)
    written = rolled if isinstance(rolled, Batch) else rolled.batch
    if written is None:
        return batch.select([])
    came = batch.select(np.isin(batch.row_ids, written.row_ids))
    written = written.by_id(came.row_ids)
    return came.with_({column: written[column] for column in written.fields})


async def score(scorer: Any, rolled: Batch) -> Batch:
    """The rows that could be scored, with REWARD and REWARD_INFO added."""
    if not len(rolled):
        return rolled.with_({REWARD: [], REWARD_INFO: (), COMPLETION: ()})
    scored = (await scorer.score(rolled, limited=False)).batch
    if scored is None:
        return rolled.select([]).with_({REWARD: [], REWARD_INFO: ()})
    return rolled.by_id(scored.row_ids).with_({name: scored[name] for name in (REWARD, REWARD_INFO)})


def summarise(scored: Batch, source: str, ks: Sequence[int] = (), asked: int = 0) -> dict[str, float]:
    """Metrics `val-core/{source}/...`: mean@N with its interval, best@N, maj@N, pass@k; how many samples were lost.

    A prompt of which samples were lost counts with those that are left; pass@k leaves it out when these are fewer than
    k, and `val-aux/{source}/pass@k_prompts` says over how many prompts it is the mean.
    """
    groups = scored[GROUP_ID].numpy()
    rewards = scored[REWARD].numpy().astype(np.float64)
    order = [np.nonzero(groups == group)[0] for group in np.unique(groups)]
    if not order:
        return {f"val-core/{source}/lost": float(asked)}
    most = max(len(rows) for rows in order)
    means = [float(rewards[rows].mean()) for rows in order]
    low, high = bootstrap_interval(means)
    found = {
        f"val-core/{source}/mean@{most}": float(np.mean(means)),
        f"val-core/{source}/mean@{most}_low": low,
        f"val-core/{source}/mean@{most}_high": high,
        f"val-core/{source}/lost": float(asked - len(rewards)) if asked else 0.0,
    }
    found |= aside(scored, source, len(order))
    if most > 1:
        found[f"val-core/{source}/best@{most}"] = float(np.mean([rewards[rows].max() for rows in order]))
        found[f"val-core/{source}/maj@{most}"] = float(np.mean([majority(scored, rows, rewards) for rows in order]))
    for k in ks:
        per_prompt = [pass_at_k(len(rows), int((rewards[rows] >= 1).sum()), k) for rows in order if len(rows) >= k]
        low, high = bootstrap_interval(per_prompt)
        found[f"val-core/{source}/pass@{k}"] = float(np.mean(per_prompt)) if per_prompt else float("nan")
        found[f"val-aux/{source}/pass@{k}_prompts"] = float(len(per_prompt))
        found[f"val-core/{source}/pass@{k}_low"], found[f"val-core/{source}/pass@{k}_high"] = low, high
    return found


def aside(scored: Batch, source: str, prompts: int) -> dict[str, float]:
    """Metrics `val-aux/{source}/...`: what the samples were like."""
    found = {f"val-aux/{source}/prompts": float(prompts)}
    if LOSS_MASK in scored and FINISH_REASON in scored:
        length_B = [len(m_T) - int(m_T.int().argmax()) if bool(m_T.any()) else 0 for m_T in scored[LOSS_MASK]]
        cut_B = [FINISH_NAMES[int(finish)] == "length" for finish in scored[FINISH_REASON]]
        found[f"val-aux/{source}/response_length"] = float(np.mean(length_B))
        found[f"val-aux/{source}/clipped_ratio"] = float(np.mean(cut_B))
    return found


def majority(scored: Batch, rows: np.ndarray, rewards: np.ndarray) -> float:
    """Reward of a group's most frequent answer (first seen wins a tie).

    Replies that a verifier could read vote with the answer that it read; without any, whole completions vote.
    """
    said = [answer_of(scored[REWARD_INFO][i]) for i in rows] if REWARD_INFO in scored else []
    votes = said if any(said) else [str(scored[COMPLETION][i]).strip() for i in rows]
    winner = Counter(vote for vote in votes if vote).most_common(1)
    return float(rewards[rows[votes.index(winner[0][0])]]) if winner else float(rewards[rows[0]])


def answer_of(info: Mapping[str, Any]) -> str:
    """What a verifier read in the reply; "" when none read anything."""
    said = (part.get("said") for part in (info, *info.get("info", {}).values()))
    return next((str(answer) for answer in said if answer not in (None, "")), "")


def sample_records(scored: Batch, most: int = 16) -> list[dict[str, Any]]:
    """Records for evals.jsonl: the same prompts each time, so that before and after can stand side by side."""
    first = [i for i in range(len(scored)) if int(scored[SAMPLE_INDEX][i]) == 0][:most]
    return [
        {
            "prompt_id": int(scored[PROMPT_ID][i]),
            "prompt": prompt_text(scored[PROMPT][i]),
            "completion": scored[COMPLETION][i],
            "reward": round(float(scored[REWARD][i]), 6),
        }
        for i in first
    ]
