"""Reads what users of other systems have: a YAML file, a shell script with hydra overrides, a Python script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docklands.config import yaml_io
from docklands.config.convert.base import Converted, System, convert, flatten
from docklands.config.convert.mindspeed_rl import MINDSPEED_RL
from docklands.config.convert.trl import TRL
from docklands.config.convert.verl import VERL
from docklands.config.load import read_text
from docklands.errors import ConfigError

SYSTEMS = {system.name: system for system in (MINDSPEED_RL, VERL, TRL)}
OVERRIDE = re.compile(r"(?<![\w./$-])\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(\"[^\"]*\"|'[^']*'|[^\s\\]+)")
VARIABLE = re.compile(r"^[^\S\n]*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;]*)\s*(?:#.*)?$", re.MULTILINE)
REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
ARGUMENT = re.compile(r"--([A-Za-z_]\w*)(?:=|\s+)(\"[^\"]*\"|'[^']*'|[^\s\\-][^\s\\]*)")
MOST_PUT_IN = 1 << 20
"""Characters that the variables of a script put in; each may hold others several times."""


def convert_file(path: Path, name: str) -> Converted:
    """A file of another system as ours. ConfigError for an unknown system, or a file in which nothing is found."""
    system = SYSTEMS.get(name)
    if system is None:
        raise ConfigError(f"--from {name}: unknown system", f"known: {', '.join(SYSTEMS)}")
    values = dict(read_values(path, system))
    if not values:
        raise ConfigError(f"{path}: no key of {system.title} found", f"its keys: {system.source}")
    return convert(values, system)


def read_values(path: Path, system: System) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that the file sets."""
    text = read_text(path)
    if path.suffix == ".py":
        yield from from_python(text, path)
    elif path.suffix in (".sh", ".bash"):
        yield from from_shell(text)
    else:
        yield from flatten(yaml_io.parse(text, str(path)).data)


def from_shell(text: str) -> Iterator[tuple[str, Any]]:
    """`a.b=value` (hydra) and `--name value`; variables that the script sets itself are put in. ConfigError."""
    text = re.sub(r"(?m)^[^\S\n]*#.*$", "", text)
    left = MOST_PUT_IN

    def put(found: re.Match[str]) -> str:
        nonlocal left
        value = known.get(found[1], found[0])
        left -= len(value)
        if left < 0:
            raise ConfigError(f"the variables of the script grow to over {MOST_PUT_IN:,} characters")
        return value

    known = {name: value.strip("\"'") for name, value in VARIABLE.findall(text)}
    for _ in range(8):  # variables in variables
        known = {name: REFERENCE.sub(put, value) for name, value in known.items()}
    for pattern in (OVERRIDE, ARGUMENT):
        for name, value in pattern.findall(text):
            plain = REFERENCE.sub(put, value.strip("\"'"))
            yield name, plain if "$" in plain else yaml_io.parse_value(plain, name)


def from_python(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Arguments of GRPOConfig(...), and the model and the reward functions of GRPOTrainer(...), as far as literals."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid Python: {error.msg}") from None
    local = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func).rpartition(".")[2]
        for keyword in call.keywords if called in ("GRPOConfig", "GRPOTrainer") else ():
            if called == "GRPOConfig" and keyword.arg:
                yield keyword.arg, literal(keyword.value)
            elif keyword.arg == "model":
                yield "model_name_or_path", literal(keyword.value)
            elif keyword.arg == "reward_funcs":
                given = keyword.value.elts if isinstance(keyword.value, ast.List | ast.Tuple) else [keyword.value]
                names = [ast.unparse(item).strip("\"'") for item in given]
                yield "reward_funcs", [f"{path}:{name}" if name in local else name for name in names]


def literal(node: ast.expr) -> Any:
    """The value of a literal; for anything else a text that is told as an expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return f"<expression {ast.unparse(node)}>"
