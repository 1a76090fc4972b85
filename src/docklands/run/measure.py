"""Speed and memory of a step, from what it measured and from the machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from docklands import device as devices

MIB = 2**20

RATES = (
    ("perf/throughput", "perf/total_num_tokens", "timing_s/step"),
    ("perf/samples_per_s", "training/samples", "timing_s/step"),
    ("perf/gen_tokens_per_s", "rollout/decode_tokens", "timing_s/gen"),
    ("perf/update_tokens_per_s", "actor/packed_tokens", "timing_s/update_actor"),
)
"""(rate, what is counted, its seconds)"""


def rates(known: Mapping[str, float], seconds: float, cpu_s: float) -> dict[str, float]:
    """Metrics of a step of `seconds` wall clock; a rate whose parts were not measured is left out."""
    found = {"timing_s/step": seconds, "perf/time_per_step": seconds, "perf/cpu_s": cpu_s}
    all_known = {**known, **found}
    for rate, count, spent in RATES:
        if all_known.get(spent, 0.0) > 0 and count in all_known:
            found[rate] = all_known[count] / all_known[spent]
    return found


def memory(device: str) -> dict[str, float]:
    """Memory of the process, now and at its peak, and of the accelerator, if any. `device`: as in run.device."""
    found = {"memory/rss_mib": devices.rss() / MIB, "memory/peak_rss_mib": peak_rss() / MIB}
    where = devices.choose(device)
    if where.is_accelerator:
        found["memory/device_mib"] = devices.memory_allocated(where) / MIB
    return found


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
