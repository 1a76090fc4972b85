"""docs/reference/config.md and docs/reference/errors.md, made from the code."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from docklands import errors
from docklands.config.schema import Config
from docklands.config.tree import as_section, item_kind, schema_sections
from docklands.config.yaml_io import flow

SIGNS = {Gt: (">", "gt"), Ge: (">=", "ge"), Lt: ("<", "lt"), Le: ("<=", "le")}

CONFIG_HEAD = """# Configuration keys

Made from `docklands.config.schema` by `make docs`; do not edit by hand.

One YAML file, checked strictly: an unknown key is an error with the nearest match. Sections merge, values replace;
`extends: other.yaml` reads another file first; `a.b=value` on the command line comes last. `docklands config show`
prints every value with its source, and the same text is written into the run directory.
"""

ERROR_HEAD = """# Errors

Made from `docklands.errors` by `make docs`; do not edit by hand.

Every error that Docklands raises on purpose is one of these. The command prints its message as one `error:` line, its
hint as one `hint:` line, and exits with its code: 2 the user's mistake, 3 the run failed, 4 a worker was lost.
"""


def render_config_markdown() -> str:
    """The page of configuration keys; ends with one newline."""
    lines = [CONFIG_HEAD]
    for path, section in schema_sections(Config):
        lines += [f"## {path}", "", inspect.cleandoc(section.__doc__ or ""), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for name, info in section.model_fields.items():
            if as_section(info.annotation) is None and item_kind(info) is None:
                cells = (f"`{path}.{name}`", kind(info), default(info), info.description or "")
                lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def kind(info: FieldInfo) -> str:
    """The type and bounds of a field in words."""
    bounds = " ".join(bound(mark) for mark in info.metadata if type(mark) in SIGNS)
    return " ".join(filter(None, (words(info.annotation), bounds)))


def bound(mark: Any) -> str:
    """`> 0`"""
    sign, attribute = SIGNS[type(mark)]
    return f"{sign} {getattr(mark, attribute):g}"


def words(annotation: Any) -> str:
    """int, number, text, list of text, one of several words."""
    simple = {int: "int", float: "number", str: "text", bool: "true/false", type(None): "null", Any: "anything"}
    if annotation in simple:
        return simple[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " / ".join(map(str, arguments))
    if origin is types.UnionType or origin is typing.Union:
        return " or ".join(map(words, arguments))
    if origin is typing.Annotated:
        return words(arguments[0])
    if origin in (list, tuple):
        return "list of " + " and ".join(dict.fromkeys(map(words, arguments)))
    return "mapping" if origin is dict else str(annotation)


def default(info: FieldInfo) -> str:
    """The default as YAML."""
    if info.is_required():
        return "required"
    return f"`{flow(info.get_default(call_default_factory=True))}`"


def render_errors_markdown() -> str:
    """The page of errors, in the order of the tree; ends with one newline."""
    lines = [ERROR_HEAD, "| error | exit code | meaning |", "|---|---|---|"]
    for depth, error in walk(errors.DocklandsError, 0):
        text = " ".join(inspect.cleandoc(error.__doc__ or "").split())
        lines.append(f"| {'&emsp;' * depth}`{error.__name__}` | {error.exit_code} | {text} |")
    return "\n".join(lines) + "\n"


def walk(error: type[errors.DocklandsError], depth: int) -> list[tuple[int, type[errors.DocklandsError]]]:
    """The tree below an error, depth first, in the order of definition; only errors of errors.py."""
    found = [(depth, error)]
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            found += walk(child, depth + 1)
    return found
