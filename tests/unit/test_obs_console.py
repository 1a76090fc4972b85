"""The console: one plain line a step, a live display in a terminal, hostile text."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from docklands.obs.console import ConsoleSink, Progress, duration_text, number_text, printable, sparkline


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_output_is_one_line_a_step() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(25, stream=stream)  # auto: a StringIO is no terminal
    for step, reward in ((1, 0.25), (2, 0.5), (3, 0.31)):
        metrics = {"critic/rewards/mean": reward, "response_length/mean": 8.24, "perf/throughput": 412.3}
        sink.write(step, {**metrics, "timing_s/step": 4.1})
        sink.stage("rollout")
    sink.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and all(len(line) <= 80 for line in lines)
    assert re.sub(" +", " ", lines[2]) == "step 3/25 reward 0.31 ▁█▃ len 8.2 412 tok/s 4.1 s/step ETA 1m30s"
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_plain_line_shows_only_what_there_is() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(2, stream=stream)
    sink.write(1, {"actor/sft_loss": 2.5, "timing_s/step": 0.05})
    assert re.sub(" +", " ", stream.getvalue()) == "step 1/2 loss 2.50 ▄ 0.05 s/step ETA 0s\n"


def test_terminal_without_block_characters() -> None:
    raw = io.BytesIO()
    sink = ConsoleSink(2, stream=io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    sink.write(1, {"critic/rewards/mean": 0.0})
    sink.write(2, {"critic/rewards/mean": 1.0})
    sink.say("答案")
    assert b"reward  1.00 _@" in raw.getvalue() and raw.getvalue().endswith(b"??\n")


def test_reader_that_goes_away_silences_the_console() -> None:
    end, begin = os.pipe()
    os.close(end)
    with pytest.raises(BrokenPipeError), os.fdopen(begin, "w") as stream:  # on closing, with the unread line
        sink = ConsoleSink(3, stream=stream)
        sink.say("hello")
        sink.write(1, {"critic/rewards/mean": 0.0})
        assert sink.mode == "off"


def test_off_says_nothing() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(2, mode="off", stream=stream)
    sink.write(1, {"critic/rewards/mean": 0.0})
    sink.say("text")
    sink.close()
    assert stream.getvalue() == ""


def test_eta_leaves_the_first_step_out_and_counts_down() -> None:
    clock = Clock()
    progress = Progress(10, clock)
    assert math.isnan(progress.seconds_per_step)
    for step, seconds in ((1, 60.0), (2, 4.0), (3, 6.0)):
        clock.now += seconds
        progress.update(step, {})
    assert progress.seconds_per_step == 5.0 and progress.eta_s == 35.0
    clock.now += 3
    assert progress.eta_s == 32.0


def test_throughput_falls_back_to_tokens_per_second() -> None:
    progress = Progress(10, Clock())
    progress.update(1, {"perf/total_num_tokens": 1000.0, "timing_s/step": 4.0})
    assert progress.tokens_per_s == 250.0


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(800)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0], 8) == "▄▄" and sparkline([], 8) == "" and sparkline([math.nan, 1.0], 8) == "▄"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (92, "1m32s"), (3599.6, "1h00m"), (7500, "2h05m"), (-3, "0s")]
)
def test_duration_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1.5, "1.5"), (412.3, "412"), (1e-5, "1.0e-05"), (123456.0, "1.2e+05")]
    + [(math.nan, "nan")],
)
def test_number_text(value: float, text: str) -> None:
    assert number_text(value) == text


def test_untrusted_text_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\n\tд") == "a\ufffd[2Jb\ufffd\ufffdc\n\tд"
    stream = io.StringIO()
    ConsoleSink(1, stream=stream).say("[red]\x1b[31m[/red]")
    assert stream.getvalue() == "[red]\ufffd[31m[/red]\n"


def test_live_display_in_a_terminal() -> None:
    """A real pseudo-terminal of 80 columns: the display appears, text is said above it, the cursor comes back."""
    code = (
        "from docklands.obs.console import ConsoleSink\n"
        "sink = ConsoleSink(25, title='quickstart')\n"
        "assert sink.mode == 'live'\n"
        "sink.start(); sink.say('[b]8 prompts x 8[/b]'); sink.stage('rollout')\n"
        "for step in range(1, 13):\n"
        "    sink.write(step, {'critic/rewards/mean': step / 20, 'response_length/mean': 8.0, 'timing_s/step': 4.0})\n"
        "sink.close(); sink.close()\n"
    )
    parent, child = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "PYTHONUTF8": "1"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=child, stderr=child, stdin=child, env=env) as process:
        os.close(child)
        raw, deadline = b"", time.monotonic() + 120
        while time.monotonic() < deadline:
            if select.select([parent], [], [], 1.0)[0]:
                try:
                    chunk = os.read(parent, 65536)
                except OSError:  # the other end is closed
                    break
                raw += chunk
            elif process.poll() is not None:
                break
        assert process.wait(timeout=120) == 0, raw.decode()
    os.close(parent)
    text = raw.decode()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") >= 1  # cursor hidden, and given back
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "[b]8 prompts x 8[/b]" in seen and "quickstart" in seen
    assert "step 12/25" in seen and "reward 0.600" in seen and "ETA 52s" in seen and "length 8.0" in seen
    assert all(len(line) <= 80 for line in seen.replace("\r", "\n").split("\n"))
