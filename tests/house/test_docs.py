"""Documentation that cannot go stale: reference pages, links, the commands of the README, the recipes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from docklands import errors
from docklands.cli.main import run
from docklands.config.reference import render_config_markdown, render_errors_markdown, walk
from docklands.config.tree import schema_leaves
from docklands.obs.reference import render_metrics_markdown
from house import ROOT, files, short

REFERENCE = ROOT / "docs" / "reference"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MARKDOWN = files(".md")
CONFIG_LINES = 40
COMMANDS = {
    "train",
    "eval",
    "generate",
    "plan",
    "graph",
    "config",
    "dash",
    "dock",
    "doctor",
    "export",
    "fleet",
    "import",
    "report",
    "trace",
}


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("config.md", render_config_markdown),
        ("errors.md", render_errors_markdown),
        ("metrics.md", render_metrics_markdown),
    ],
)
def test_reference_pages_are_what_the_code_says(name: str, render) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == render(), "run `make docs`"


def test_every_key_is_documented() -> None:
    page = (REFERENCE / "config.md").read_text(encoding="utf-8")
    assert [key for key, _ in schema_leaves() if f"| `{key}` |" not in page] == []
    assert [key for key, info in schema_leaves() if not info.description] == []


def test_every_error_is_documented_and_drawn() -> None:
    page, drawing = (REFERENCE / "errors.md").read_text(encoding="utf-8"), errors.__doc__ or ""
    for depth, error in walk(errors.DocklandsError, 0):
        assert f"`{error.__name__}` | {error.exit_code} |" in page
        line = next(line for line in drawing.splitlines() if re.search(rf"\b{error.__name__}\b", line))
        assert int(re.search(r"\b[234]\b", line)[0]) == error.exit_code  # type: ignore[index]
        assert (len(line) - len(line.lstrip("│├└─ "))) // 4 == depth


def links(path: Path) -> list[str]:
    """Relative targets of a page's links and pictures."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    return [target for target in found if not re.match(r"^[a-z]+:|^#", target)]


def test_relative_links_resolve() -> None:
    broken = [
        f"{short(page)}: {target}"
        for page in MARKDOWN
        for target in links(page)
        if not (page.parent / target.split("#")[0]).exists()
    ]
    assert MARKDOWN and broken == []


def commands(page: Path) -> list[list[str]]:
    """Command lines in a page's sh and bash blocks, and in its inline code."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:docklands|make) [^`]+)`", text)
    stripped = [line.strip().removeprefix("$ ") for line in lines]
    return [shlex.split(line, comments=True) for line in stripped if re.match(r"(docklands|make)\b", line)]


README = [(page, words) for page in MARKDOWN for words in commands(page)]


@pytest.mark.parametrize("words", [w for _, w in README if w[0] == "make"], ids=" ".join)
def test_make_targets_of_the_pages_exist(words: list[str]) -> None:
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [w for _, w in README if w[0] == "docklands"], ids=" ".join)
def test_docklands_commands_of_the_pages_exist(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command knows the options; the recipes that it names exist and take the overrides."""
    monkeypatch.chdir(ROOT)
    command = words[1]
    assert command in COMMANDS or command.startswith("-")
    options = [word.split("=")[0] for word in words[2:] if word.startswith("--")]
    names = [words[1], *([words[2]] if command in ("config", "dock", "import") and len(words) > 2 else [])]
    helped = help_text(names)
    assert [option for option in options if option not in helped] == []
    recipes = [word for word in words[2:] if word.endswith(".yaml") and word != "recipe.yaml"]  # the reader's own
    overrides = [word for word in words[2:] if re.match(r"[a-z_]+(\.[a-z_0-9]+)+=", word)]
    for recipe in recipes:
        assert run(["config", "show", recipe, *overrides]) == 0


def help_text(names: list[str]) -> str:
    """What `docklands NAMES --help` prints."""
    import contextlib
    import io

    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer), contextlib.redirect_stderr(buffer):
        assert run([*[name for name in names if not name.startswith("-")], "--help"]) == 0
    return buffer.getvalue()


def test_the_readme_shows_the_two_commands() -> None:
    words = commands(ROOT / "README.md")
    assert ["make", "quickstart"] in words and ["make", "test"] in words


def test_there_are_recipes() -> None:
    names = {path.name for path in CONFIGS}
    assert {"quickstart.yaml", "learns_to_reason.yaml"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_recipes_are_short_checked_and_have_a_graph(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= CONFIG_LINES
    assert run(["config", "check", str(path)]) == 0, capsys.readouterr().err
    assert " ok" in capsys.readouterr().out
    for option in ([], ["--mermaid"]):
        assert run(["graph", str(path), *option]) == 0
    assert "update" in capsys.readouterr().out
