"""The command line: every error is one line, a hint and an exit code; the small commands do what they say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from docklands import __version__
from docklands.cli import doctor
from docklands.cli.evaluate import table
from docklands.cli.main import report_error, run
from docklands.cli.shared import place
from docklands.config.load import load_config
from docklands.config.paths import cache_dir, home, models_dir, resolve_model_path
from docklands.config.yaml_io import flow
from docklands.errors import ConfigError, DataError, NonFinite, WorkerLost
from docklands.obs.rundir import RunDir

GOOD = "run: {steps: 3}\ndata: {source: 'task:mix6'}\nreward: {functions: [{name: exact_match}]}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(GOOD, encoding="utf-8")
    return path


def refused(capsys: pytest.CaptureFixture[str], words: Sequence[str], error: str, hint: str = "") -> None:
    """The command line exits with 2 and says `error` on one line of stderr, and the hint on another."""
    assert run(words) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and [line.split(": ")[0] for line in lines] in (["error"], ["error", "hint"])
    assert error in lines[0] and hint in lines[-1] and "Traceback" not in err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"docklands {__version__}\n"
    assert run(["--help"]) == 0
    names = re.findall(r"^│ ([a-z]+) ", capsys.readouterr().out, flags=re.MULTILINE)
    assert names == "train eval generate plan graph doctor export report trace dash config dock fleet import".split()
    assert run([]) == 2 and "Usage" in capsys.readouterr().out


def test_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, ["trian"], "No such command 'trian'", "`docklands --help`")
    refused(capsys, ["train"], "Missing argument 'CONFIG'", "`docklands train --help`")
    refused(capsys, ["train", "x.yaml", "--resumee"], "No such option", "`docklands train --help`")
    refused(capsys, ["config", "shw", "x"], "No such command 'shw'", "`docklands config --help`")


def test_a_wrong_config_is_the_users_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path, config: Path) -> None:
    (tmp_path / "bad.yaml").write_text("clip_high: 0.3\n")
    for words in (["train"], ["eval"], ["graph"], ["config", "show"], ["config", "check"]):
        command = [*words, str(tmp_path / "bad.yaml")]
        refused(capsys, command, f"unknown key clip_high ({tmp_path / 'bad.yaml'}:1)", "mean algorithm.clip_high?")
        refused(capsys, [*words, str(tmp_path / "no.yaml")], "no file", "bad.yaml, c.yaml")
        refused(capsys, [*words, str(config), "run.stepss=1"], "unknown key run.stepss (command line)", "run.steps?")
        refused(capsys, [*words, str(tmp_path)], "is not a run directory")


def test_several_faults_are_a_line_each(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert run(["config", "check", str(config), "run.steps=x", "run.seed=y"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(re.match(r"error: run\.(steps|seed): got '[xy]'", line) for line in lines)


def test_group_size_one_with_grpo(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    refused(capsys, ["config", "check", str(config), "rollout.samples_per_prompt=1"], "samples_per_prompt")


def test_show_check_and_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path, config: Path, run_dir: Path) -> None:
    assert run(["config", "show", str(config), "run.seed=5"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"steps: 3 +# .*c\.yaml:1", shown) and re.search(r"seed: 5 +# command line", shown)
    (tmp_path / "again.yaml").write_text(shown)
    assert load_config(tmp_path / "again.yaml")[0] == load_config(config, ["run.seed=5"])[0]
    assert run(["config", "diff", str(config), str(tmp_path / "again.yaml")]) == 0
    assert capsys.readouterr().out == "run.seed: 42 -> 5\n"
    assert run(["config", "diff", str(config), str(config)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert run(["config", "check", str(config)]) == 0
    assert "16 prompts x 8 = 128 samples -> 1 update x 128" in capsys.readouterr().out
    assert run(["config", "show", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf'dir: "?{re.escape(str(run_dir.parent))}"? +# command line', shown)
    assert re.search(r"name: one +# command line", shown)


def test_check_names_what_was_set_but_does_nothing(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    """sync.* moves weights between processes, and only a process can be lost: in one process neither exists."""
    command = ["config", "check", str(config)]
    idle = ["sync.method=broadcast", "sync.gate=false", "sync.probe_every=2", "fleet.max_restarts=7"]
    assert run([*command, *idle, "fleet.ray_address=x"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == (
        "set, but without effect in one process: sync.method, sync.gate, sync.probe_every, fleet.max_restarts, "
        "fleet.ray_address"
    )
    assert run([*command, *idle, "rollout.layout.dp=2"]) == 0  # worker processes: all of it is read
    assert "without effect" not in capsys.readouterr().out
    assert run([*command, "fleet.max_restarts=7", "dock.transport=processes"]) == 0
    assert "without effect" not in capsys.readouterr().out
    assert run([*command, "sync.probe_tolerance=0.1", "rollout.layout.dp=2"]) == 0
    assert capsys.readouterr().out.endswith("set, but without effect with these workers: sync.probe_tolerance\n")
    assert run([*command, "layout.context=ring", "layout.sp=false", "layout.dp=2"]) == 0
    assert capsys.readouterr().out.endswith("with these workers: layout.context, layout.sp\n")
    assert run([*command, "layout.sp=false", "layout.tp=2"]) == 0
    assert "without effect" not in capsys.readouterr().out


def test_graph(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert run(["graph", str(config)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("grpo: 16 prompts x 8") and "rollout" in out and "@actor" in out
    assert run(["graph", str(config), "--mermaid"]) == 0
    assert capsys.readouterr().out.startswith("flowchart LR\n")


def test_errors_become_lines_and_codes(capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[BaseException, int, str]] = [
        (ConfigError("no such thing", "try that"), 2, "error: no such thing\nhint: try that\n"),
        (DataError("row 3 lacks 'prompt'"), 2, "error: row 3 lacks 'prompt'\n"),
        (NonFinite("grad of layer 2"), 3, "error: grad of layer 2\n"),
        (WorkerLost("rollout rank 1"), 4, "error: rollout rank 1\n"),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [NonFinite("loss")])]), 3, "error: loss\n"),
        (ExceptionGroup("tasks", [WorkerLost("a", "b"), WorkerLost("a", "b")]), 4, "error: a\nhint: b\n"),
        (BaseExceptionGroup("tasks", [KeyboardInterrupt(), NonFinite("loss")]), 130, "interrupted\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ]
    for error, code, text in cases:
        assert report_error(error) == code
        assert capsys.readouterr().err == text


def test_an_unexpected_error_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (ZeroDivisionError("1/0"), ExceptionGroup("tasks", [NonFinite("loss"), ZeroDivisionError("1/0")])):
        assert report_error(error) == 3
        assert "ZeroDivisionError: 1/0" in capsys.readouterr().err


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "docklands.cli.main", *words]


def test_the_process_exits_with_the_code(config: Path) -> None:
    done = subprocess.run(command("config", "show", str(config), "a=1"), capture_output=True, text=True, timeout=180)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: unknown key a (command line)")


def test_a_closed_pipe_is_no_error(config: Path) -> None:
    with subprocess.Popen(
        command("config", "show", str(config)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(180) == 0


def test_ctrl_c_while_everything_is_imported_is_130(tmp_path: Path) -> None:
    """The interrupt comes from inside the import of the command, which is where the first 0.3 s go."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    code = "from docklands.cli.entry import main; main()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=180, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    """A command that waits (for a config from a pipe that nobody writes) ends at once, without a traceback."""
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # these tests may run where a shell has it ignored
    with subprocess.Popen(
        command("config", "show", str(pipe)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heard
    ) as process:
        opened = wait_until_opened(pipe)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=180)
        os.close(opened)
        assert process.returncode == 130 and err == b"interrupted\n"


def test_ctrl_c_after_what_it_said_changes_nothing_more(tmp_path: Path) -> None:
    """A process that is about to exit with 130 does not die of another one."""
    code = (
        "import os, signal, sys\n"
        "from docklands.cli import main\n"
        "main.run = lambda _: 130\n"
        "sys.exit = lambda code: (os.kill(os.getpid(), signal.SIGINT), os._exit(code))\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("given", [None, "7"])
def test_prepared_products_are_bounded_unless_the_user_says_so(given: str | None) -> None:
    names = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= dict.fromkeys(names, given) if given else {}
    code = f"import docklands.cli.main, os; print(*(os.environ[name] for name in {names}))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180)
    assert done.stdout.split() == [given or "256"] * 2


def wait_until_opened(pipe: Path) -> int:
    """Opens the writing end, which works as soon as the process opened the reading end."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            opened = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.05)
        else:
            time.sleep(0.2)
            return opened
    raise AssertionError("the process did not open the file")


def test_generate_refuses_what_the_model_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(Path(__file__).parents[2] / "assets/mix6-warm"), "--prompt"]
    refused(capsys, [*words, "123456=", "--max-tokens", "506"], "7 prompt + 506 response tokens", "--max-tokens 505")
    refused(capsys, [*words, ""], "the prompt is empty", "--prompt")
    assert run([*words, "123456=", "--max-tokens", "6", "--temperature", "0"]) == 0


def test_eval_needs_k_samples(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    refused(capsys, ["eval", str(config), "--n", "4", "--k", "8"], "pass@8 needs at least 8 samples", "--n 8")


def test_eval_table() -> None:
    text = table({"mean@4": 0.5, "mean@4_low": 0.4, "mean@4_high": 0.6, "lost": 0.0, "steps": 3})
    assert text.splitlines() == ["mean@4  0.5000  [0.4000, 0.6000]", "lost    0.0000", "steps   3"]


def test_missing_models_and_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, config: Path, monkeypatch) -> None:
    monkeypatch.setenv("DOCKLANDS_CACHE", str(tmp_path / "cache"))
    refused(capsys, ["generate", str(tmp_path / "no"), "--prompt", "x"], "no model directory")
    refused(capsys, ["generate", "cache:none", "--prompt", "x"], "cache/models/none", "docklands import gguf")
    refused(capsys, ["import", "gguf", str(tmp_path / "no.gguf")], "no file")
    refused(capsys, ["import", "gguf", "--package", "no_such_package"], "no_such_package")
    for name in ("report", "trace"):
        refused(capsys, [name, str(tmp_path / "no")], "no run directory", "docklands train CONFIG")
        refused(capsys, [name, str(config)], "no run directory")
    refused(capsys, ["export", str(tmp_path), str(tmp_path / "out")], "is not a run directory")


def test_an_imported_model_is_not_imported_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("DOCKLANDS_CACHE", str(tmp_path))
    target = tmp_path / "models" / "SmolLM2-135M-Instruct"
    target.mkdir(parents=True)
    (target / "config.json").write_text("{}")
    assert run(["import", "gguf"]) == 0
    assert capsys.readouterr().out.startswith(f"{target} (there already")


def test_trace_and_report_of_a_run_directory(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    from docklands.obs.spans import SpanRecorder, recording, span

    with recording(SpanRecorder(run_dir / "spans.jsonl")), span("stage/rollout", role="rollout", step=1):
        pass
    assert run(["trace", str(run_dir)]) == 0
    written = Path(capsys.readouterr().out.strip())
    events = json.loads(written.read_text())["traceEvents"]
    assert written == run_dir / "trace.json" and any(event["name"] == "stage/rollout" for event in events)
    assert run(["report", str(run_dir)]) == 0
    assert Path(capsys.readouterr().out.strip()).read_text().lstrip().lower().startswith("<!doctype html")


def test_another_number_of_generators(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    """A number that no fleet has is refused, and a run that nobody is at work on is told apart."""
    wishes = run_dir / "fleet.json"
    apart = "fleet: {placement: disaggregated}\ndock: {max_staleness: 1}\nrollout: {layout: {dp: 1}}\n"
    (run_dir / "config.yaml").write_text(GOOD + apart, encoding="utf-8")
    assert run(["fleet", "scale", str(run_dir), "100000000"]) == 2 and not wishes.exists()
    capsys.readouterr()
    assert run(["fleet", "scale", str(run_dir), "3"]) == 0 and json.loads(wishes.read_text()) == {"generators": 3}
    assert "no process of this machine" in capsys.readouterr().err
    going = RunDir.resume(run_dir)
    assert run(["fleet", "scale", str(run_dir), "2"]) == 0 and json.loads(wishes.read_text()) == {"generators": 2}
    assert capsys.readouterr().err == ""
    going.release()


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"(ok  |warn)  \S", line) for line in lines[:-1])
    assert lines[-1].startswith(f"{sum(line.startswith('warn') for line in lines)} warning")
    words = " ".join(lines)
    for part in ("python", "torch", "threads", "device", "memory", "disk", "kernels", "package", "optional", "models"):
        assert part in words
    assert doctor.cpu_flags(tmp_path / "none") == set()
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t\t: sse avx2\n")
    assert doctor.cpu_flags(tmp_path / "cpuinfo") == {"sse", "avx2"}
    assert str(doctor.Finding("x", "slow", False)).startswith("warn  x")


def test_place_names_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("")
    for given in ("runs/a b", "no", str(tmp_path / "x" / "1e5")):
        config, sources = load_config(tmp_path / "c.yaml", place(Path(given)))
        assert config.run_dir.resolve() == Path(given).resolve() and sources["run.name"] == "command line"
    assert place(Path("."))[1] == f"run.name={flow(tmp_path.name)}"
    with pytest.raises(ConfigError, match="cannot be a run directory"):
        place(Path("/"))


def test_where_models_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKLANDS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "docklands" and models_dir() == cache_dir() / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "docklands"
    monkeypatch.setenv("DOCKLANDS_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    (tmp_path / "own" / "models" / "m").mkdir(parents=True)
    assert resolve_model_path("cache:m") == tmp_path / "own" / "models" / "m"
    assert resolve_model_path("~/own") == tmp_path / "own"
    with pytest.raises(DataError, match="no model directory"):
        resolve_model_path("cache:other")
    monkeypatch.setenv("HOME", "")
    assert home().is_absolute() and home() != Path("/.cache")
