"""One run directory, as the page asks for it: read on demand, a bounded part at a time, in bounded memory."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from docklands.dashboard.files import Tail, file_size, number, open_plain, read_end, read_text
from docklands.dashboard.samples import read_step
from docklands.dashboard.series import MetricStore
from docklands.dashboard.spans import SpanFile, waits
from docklands.errors import ConfigError
from docklands.obs.drawing import BOX_W, place_graph, plain_stages
from docklands.obs.files import parse_line
from docklands.obs.rundir import RunDir

BEFORE_ALL = -(1 << 53)
AGAIN_S = 0.5
"""Seconds within which two questions are answered from one look at the files."""
READ_S = 0.5
"""Seconds that one look spends on a long file before it answers; the next look goes on."""
SIGHTS = 600
"""Lines of dock.jsonl that are kept."""
FRESH_S = 15.0
"""Seconds since the last line for which a run counts as running whose lock is not seen (another machine's)."""
SMALL = 1 << 20
MOST_LOGS = 200
MOST_STEPS = 3
MEMORY_STEPS = 60
MOVES = ("memory", "reshard", "handover", "gate", "publish")


class RunReader:
    """Reads one run directory. Safe to use from several threads; writes and locks nothing."""

    def __init__(self, path: Path, again_s: float = AGAIN_S) -> None:
        """`again_s`: see AGAIN_S. Raises ConfigError when there is no such directory or no run in it."""
        self.dir = RunDir(path)
        if not path.is_dir():
            raise ConfigError(f"no run directory {path}", "`docklands train CONFIG` prints where it writes")
        if not any(file.is_file() for file in (self.dir.config, self.dir.metrics, self.dir.env)):
            raise ConfigError(f"{path} is not a run directory: it has no config.yaml and no metrics.jsonl")
        self.name = self.dir.path.resolve().name
        self.spans = SpanFile(self.dir.spans)
        self._lock = threading.Lock()
        self._metrics, self._evals, self._flow = Tail(self.dir.metrics), Tail(self.dir.evals), Tail(self.dir.flow)
        self._store, self._scores = MetricStore(), MetricStore()
        self._sights: deque[dict[str, Any]] = deque(maxlen=SIGHTS)
        self._looked = -math.inf
        self._again_s = again_s
        self._lines = 0
        self._parsed: tuple[tuple[float, int], dict[str, Any]] = ((0.0, -1), {})

    # --- what the page polls -----------------------------------------------------------------------------------

    def state(self, look: bool = True) -> dict[str, Any]:
        """How the run stands; `version` changes whenever there is something new to show.

        look  whether to read what is new (of many runs, a poll reads some)
        """
        with self._lock:
            if look:
                self._refresh()
            steps, lines, left = self._store.steps, self._lines, self._metrics.left
            bad = {name: {"times": n, "step": step} for name, (n, step) in sorted(self._store.bad.items())[:20]}
        config = self._config()
        planned = config.get("run.steps")
        planned = planned if isinstance(planned, int) else None
        size = file_size(self.dir.spans)
        return {
            "name": str(config.get("run.name") or self.name)[:120],
            "folder": str(self.dir.path),
            "state": self._standing(steps, planned),
            "step": steps,
            "steps": planned,
            "algorithm": str(config.get("algorithm.name", ""))[:60],
            "model": Path(str(config.get("model.path", ""))).name[:80],
            "data": str(config.get("data.source", ""))[:120],
            "stuck": read_text(self.dir.watchdog, 2000).partition("\n")[0][:300],
            "not_finite": bad,
            "unread_bytes": left,
            "version": f"{lines}.{size}",
        }

    def series(self, wanted: Mapping[str, int], epoch: int | None = None) -> dict[str, Any]:
        """Points of metrics, name -> after which step: when the page's `epoch` no longer holds, all of them.

        {epoch, whole: whether to forget what was sent before, series: {name: {steps, values, per}}}
        """
        with self._lock:
            self._refresh()
            known = self._store.epoch + self._scores.epoch
            found: dict[str, Any] = {}
            for name, since in wanted.items():
                after = since if epoch == known else BEFORE_ALL
                for store in (self._store, self._scores):
                    if name in store.series:
                        steps, values = store.series[name].after(after)
                        found[name] = {"steps": steps, "values": values, "per": store.series[name].per}
        return {"epoch": known, "whole": epoch != known, "series": found}

    def latest(self) -> dict[str, tuple[int, float]]:
        """name -> (step, value) of every metric's last point."""
        with self._lock:
            self._refresh()
            every = [*self._store.series.items(), *self._scores.series.items()]
            return {name: series.last for name, series in every if series.last is not None}

    # --- views -------------------------------------------------------------------------------------------------

    def graph(self) -> dict[str, Any]:
        """The dataflow graph laid out, and where the rows stood at the last looks."""
        stages = self._stages()
        with self._lock:
            self._refresh()
            sights = list(self._sights)
        if not stages:
            return {"stages": [], "flow": sights}
        placed = place_graph(stages, extra=44.0)
        boxes = {name: {"x": x, "y": y, "h": placed.tall[name]} for name, (x, y) in placed.at.items()}
        drawn = {"boxes": boxes, "width": BOX_W, "size": placed.size, "routes": placed.routes}
        return {"stages": stages, **drawn, "back": placed.back, "label": placed.label, "flow": sights}

    def timeline(self, start: float | None, end: float | None, step: int | None) -> dict[str, Any]:
        """Spans of a window of time, of a step (counted from 1), or of the last steps, and who waited for whom."""
        extent = self.spans.extent()
        if extent is None:
            return {"extent": None, "spans": [], "waits": []}
        if start is None or end is None:
            start, end = self._window(step, extent)
        found = self.spans.window(start, end)
        found["waits"] = [] if found["hidden"] else waits(found["spans"], self._stages())
        return {"extent": extent, "start": start, "end": end, **found}

    def memory(self) -> dict[str, Any]:
        """What spans tell of memory and resharding: bytes by tier over time, over the last steps.

        {tiers: [[Unix seconds, {name: bytes}]], moves: spans that moved weights, last ones}
        """
        extent = self.spans.extent()
        if extent is None:
            return {"tiers": [], "moves": []}
        begin = self.spans.step(max(0, self.spans.last_step() - MEMORY_STEPS))
        start = begin[0] if begin else extent[1] - 600.0
        moves = self.spans.window(start, extent[1], lambda name: name.partition("/")[0] in MOVES)["spans"]
        tiers = []
        for row in sorted(moves, key=lambda r: r["start"] + r["duration"]):
            held = {k: v for k, v in row["attributes"].items() if k.endswith("_bytes") and not isinstance(v, str)}
            if row["name"].startswith("memory/") and held:
                tiers.append([row["start"] + row["duration"], held])
        return {"tiers": tiers[-1000:], "moves": moves[-200:]}

    def samples(self, step: int | None) -> dict[str, Any]:
        """See read_step."""
        return read_step(self.dir.samples, step)

    def config(self) -> dict[str, Any]:
        """The configuration, flat: dotted key -> value; and what it ran on."""
        return {"config": self._config(), "env": flat(small_json(self.dir.env))}

    def logs(self) -> dict[str, str]:
        """The end of every log."""
        folder = self.dir.log
        if folder.is_symlink() or not folder.is_dir():
            return {}
        names = sorted(path.name for path in folder.iterdir() if path.suffix in (".log", ".txt"))[:MOST_LOGS]
        return {name: read_end(folder / name) for name in names}

    # --- inside ------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Read what is new. Called under the lock."""
        now = time.monotonic()
        if now - self._looked < self._again_s:
            return
        self._looked = now
        for tail, store in ((self._metrics, self._store), (self._evals, self._scores)):
            self._read(tail, store)
            while tail.left > 0 and time.monotonic() - now < READ_S:
                self._read(tail, store)
        again, rows = self._flow.read()
        if again:
            self._sights.clear()
        self._sights.extend(sight for row in rows if (sight := sight_of(row)) is not None)
        self._lines += len(rows)

    def _read(self, tail: Tail, store: MetricStore) -> None:
        """A part of a file of metrics."""
        again, rows = tail.read()
        if again:
            store.restart()
            self._lines += 1
        for row in rows:
            store.add(row)
        self._lines += len(rows)

    def _standing(self, steps: int, planned: int | None) -> str:
        """ "running", "done" (every planned step was made) or "stopped" (it ended before, however)."""
        if is_locked(self.dir.lock):
            return "running"
        if planned is not None and steps >= planned:
            return "done"
        newest = max((modified(p) for p in (self.dir.metrics, self.dir.spans, self.dir.flow)), default=0.0)
        return "running" if time.time() - newest < FRESH_S else "stopped"

    def _window(self, step: int | None, extent: tuple[float, float]) -> tuple[float, float]:
        """The window of a step; without one of the last MOST_STEPS steps, else of the last minute."""
        if step is not None:
            found = self.spans.step(step - 1)
            return found or extent
        last = self.spans.last_step()
        whole = [
            found for n in range(max(0, last + 1 - MOST_STEPS), last + 1) if (found := self.spans.step(n)) is not None
        ]
        if whole:
            return whole[0][0], max(end for _, end in whole)
        return max(extent[0], extent[1] - 60.0), extent[1]

    def _stages(self) -> list[dict[str, Any]]:
        return plain_stages(small_json(self.dir.graph))[:200]

    def _config(self) -> dict[str, Any]:
        stamp = (modified(self.dir.config), file_size(self.dir.config))
        if stamp != self._parsed[0]:
            self._parsed = (stamp, parsed_yaml(read_text(self.dir.config, SMALL)))
        return self._parsed[1]


def parsed_yaml(text: str) -> dict[str, Any]:
    """A configuration, flat. Empty when it is torn, and when it uses aliases (which can grow without bound)."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, loader)):
            return {}
        return flat(yaml.load(text, loader))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}


def flat(value: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested mappings as dotted keys; lists and anything else as texts, numbers as they are."""
    found: dict[str, Any] = {}
    for key, item in value.items() if isinstance(value, Mapping) else ():
        name = f"{prefix}{key}"[:200]
        if isinstance(item, Mapping) and item and depth < 8:
            found |= flat(item, f"{name}.", depth + 1)
        elif item is None or isinstance(item, bool) or number(item) is not None:
            found[name] = item
        else:
            found[name] = str(item)[:2000]
        if len(found) > 5000:
            break
    return found


def sight_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A line of dock.jsonl as the page gets it; None when it is something else."""
    stages, when = row.get("stages"), row.get("time")
    if not isinstance(stages, dict) or number(when) is None:
        return None
    counts = {
        str(name)[:60]: {k: v for k, v in held.items() if isinstance(v, int) and k in ("ready", "leased", "done")}
        for name, held in list(stages.items())[:200]
        if isinstance(held, dict)
    }
    numbers = {k: row.get(k) for k in ("step", "in_flight", "bytes") if isinstance(row.get(k), int)}
    return {"time": when, "stages": counts, **numbers}


def small_json(path: Path) -> dict[str, Any]:
    """A small JSON file; empty when it is missing, torn, or no object."""
    return parse_line(read_text(path, SMALL).encode("utf-8", "replace")) or {}


def modified(path: Path) -> float:
    """When a file last changed, Unix seconds; 0 when there is none."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def is_locked(path: Path) -> bool:
    """Whether a process of this machine is seen to hold the run's lock; never takes it."""
    file = open_plain(path)
    if file is None:
        return False
    with file:
        place = os.fstat(file.fileno())
    wanted = f"{os.major(place.st_dev):02x}:{os.minor(place.st_dev):02x}:{place.st_ino}"
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as locks:
            return any(wanted in line.split() and "WRITE" in line for line in locks)
    except OSError:
        return False
