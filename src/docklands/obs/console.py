"""What a person sees while a run trains: a live display in a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

Mode = Literal["auto", "live", "plain", "off"]

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
SCORES = (("critic/rewards/mean", "reward"), ("critic/score/mean", "reward"), ("actor/sft_loss", "loss"))
DETAILS = (
    ("actor/pg_loss", "loss"),
    ("actor/kl_loss", "KL"),
    ("actor/ppo_kl", "ppo KL"),
    ("actor/entropy", "entropy"),
    ("actor/grad_norm", "grad"),
    ("critic/vf_loss", "value loss"),
    ("completions/clipped_ratio", "cut"),
)


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """The whole history in at most `width` characters (means of equal pieces), from its minimum to its maximum."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    columns = min(width, len(finite))
    edges = [round(i * len(finite) / columns) for i in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    low, high = min(means), max(means)
    if high - low < 1e-12:
        return blocks[len(blocks) // 2 - 1] * columns
    return "".join(blocks[round((m - low) / (high - low) * (len(blocks) - 1))] for m in means)


def duration_text(seconds: float) -> str:
    """45s, 1m32s, 2h05m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def number_text(value: float) -> str:
    """Three significant digits, never longer than eight characters."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def printable(text: str) -> str:
    """Untrusted text without control characters, which could drive the terminal."""
    return "".join(
        c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else "\N{REPLACEMENT CHARACTER}" for c in text
    )


class Progress:
    """The history of a run, and what to say about it."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total_steps
        self.step = 0
        self.scores: list[float] = []
        self.score_name = "reward"
        self.metrics: Mapping[str, float] = {}
        self._clock = clock
        self._last = clock()
        self._seconds: list[float] = []

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """One finished step."""
        now = self._clock()
        self._seconds.append(metrics.get("timing_s/step", now - self._last))
        self._last, self.step, self.metrics = now, step, metrics
        for key, name in SCORES:
            if key in metrics:
                self.scores.append(metrics[key])
                self.score_name = name
                break

    @property
    def seconds_per_step(self) -> float:
        """Mean of the last ten steps; the first of all (it warms up) does not count once there are others."""
        recent = self._seconds[1:][-10:] or self._seconds
        return sum(recent) / len(recent) if recent else math.nan

    @property
    def eta_s(self) -> float:
        """Seconds to the end; counts down between steps."""
        return max(0.0, (self.total - self.step) * self.seconds_per_step - (self._clock() - self._last))

    @property
    def tokens_per_s(self) -> float | None:
        if "perf/throughput" in self.metrics:
            return self.metrics["perf/throughput"]
        tokens = self.metrics.get("perf/total_num_tokens")
        return None if tokens is None or not self._seconds or self._seconds[-1] <= 0 else tokens / self._seconds[-1]

    def line(self, blocks: str = BLOCKS) -> str:
        """The step in one line: step  3/25  reward 0.31 ▂▃▅  len 8.2  412 tok/s  4.1 s/step  ETA 1m32s."""
        parts = [f"step {self.step:>{len(str(self.total))}}/{self.total}"]
        if self.scores:
            spark = sparkline(self.scores, 10, blocks)
            parts.append(f"{self.score_name} {self.scores[-1]:5.2f} {spark:<{min(10, self.total)}}")
        if "response_length/mean" in self.metrics:
            parts.append(f"len {self.metrics['response_length/mean']:.1f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.0f} tok/s")
        parts.append(
            f"{self._seconds[-1] if self._seconds else math.nan:.{1 if self._seconds[-1] >= 1 else 2}f} s/step"
        )
        parts.append(f"ETA {duration_text(self.eta_s)}")
        return "  ".join(parts)


class ConsoleSink:
    """Shows each step on `stream` (default: stdout).

    mode   live: a display that redraws itself; plain: one line a step; off: nothing; auto: live in a terminal
    title  heading of the live display
    """

    def __init__(
        self, total_steps: int, *, title: str = "docklands", mode: Mode = "auto", stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stdout
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self.mode = ("live" if terminal else "plain") if mode == "auto" else mode
        self.progress = Progress(total_steps)
        self._title = title
        self._stage, self._since = "", time.monotonic()
        self._blocks = BLOCKS if encodes(self._stream, BLOCKS) else ASCII_BLOCKS
        self._live = None
        if self.mode == "live":
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, force_terminal=True)
            self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=4, redirect_stderr=True)

    def start(self) -> None:
        """Show the live display; `write` does so by itself."""
        if self._live is not None and not self._live.is_started:
            self._live.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.update(step, metrics)
        if self.mode == "plain":
            self._print(self.progress.line(self._blocks))
        self.start()

    def stage(self, name: str) -> None:
        """What is running now; only the live display shows it."""
        self._stage, self._since = name, time.monotonic()

    def say(self, text: str) -> None:
        """Print lines, above the live display. Control characters and markup in `text` have no effect."""
        if self.mode == "off":
            return
        if self._live is not None:
            self._live.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._print(printable(text).encode(encoding, "replace").decode(encoding))

    def _print(self, text: str) -> None:
        """A reader that has gone away (`| head`) silences the console; the run goes on."""
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            self.mode = "off"

    def close(self) -> None:
        """Leave the last state standing; the cursor is given back."""
        if self._live is not None and self._live.is_started:
            self._stage = ""
            self._live.stop()

    def _panel(self) -> RenderableType:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now, width = self.progress, 26
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, now.total), completed=now.step, width=width)
        pace = "" if math.isnan(now.seconds_per_step) else f"{number_text(now.seconds_per_step)} s/step"
        eta = f"ETA {duration_text(now.eta_s)}" if pace and now.step < now.total else ""
        head.add_row(Text(f"step {now.step}/{now.total}", style="bold"), bar, Text(pace), Text(eta, style="cyan"))
        body = Table.grid(padding=(0, 0))
        body.add_row(head)
        if now.scores:
            score = Text.assemble((f"{now.score_name} ", "dim"), (f"{now.scores[-1]:.3f}", "bold green"), "  ")
            score.append(sparkline(now.scores, 40, self._blocks), style="green")
            score.append(f"  from {now.scores[0]:.3f}", style="dim")
            body.add_row(score)
        if now.metrics:
            body.add_row(self._details())
        if self._stage:
            body.add_row(Text(f"now: {self._stage} {duration_text(time.monotonic() - self._since)}", style="dim"))
        return Panel(body, title=Text(self._title), title_align="left", width=self._width)

    @property
    def _width(self) -> int:
        return min(80, self._live.console.width) if self._live else 80

    def _details(self) -> RenderableType:
        from rich.text import Text

        metrics, text = self.progress.metrics, Text()
        pieces: list[tuple[str, str]] = []
        if "response_length/mean" in metrics:
            pieces.append(("length", f"{metrics['response_length/mean']:.1f}"))
        if self.progress.tokens_per_s is not None:
            pieces.append(("tok/s", f"{self.progress.tokens_per_s:.0f}"))
        pieces += [(name, number_text(metrics[key])) for key, name in DETAILS if key in metrics]
        column = 0
        for name, value in pieces:  # wrapped here, so that a name and its value stay together
            size = len(name) + len(value) + 1
            if column and column + 3 + size > self._width - 4:
                text.append("\n")
                column = 0
            text.append("   " if column else "").append(f"{name} ", style="dim").append(value)
            column += size + (3 if column else 0)
        return text


def encodes(stream: TextIO, text: str) -> bool:
    """Whether the stream's encoding has these characters."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
