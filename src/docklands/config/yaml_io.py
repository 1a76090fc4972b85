"""YAML in and out: the YAML 1.2 core schema, with the line of every key, duplicate keys refused.

PyYAML by itself reads YAML 1.1, where `1e-5` is text, `no` is false and `1:30` is 90. A configuration must mean what
it says, so only null, true/false, plain integers and floats (with or without a dot) are anything but text here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from docklands.errors import ConfigError

NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
NOT_FINITE = re.compile(r"^[-+]?\.(?:inf|Inf|INF|nan|NaN|NAN)$")
PLAIN = re.compile(r"^[A-Za-z_][\w./-]*(?::[\w./-]+)*$", re.ASCII)
MOST_NODES = 100_000
DEEPEST = 64
LONGEST = 1000  # digits; Python itself refuses to read some thousand
TAG = "tag:yaml.org,2002:"
TAGS = frozenset(TAG + kind for kind in "null bool int float str timestamp merge value map seq".split())


@dataclass
class Document:
    """A parsed YAML mapping. `lines` maps a path of keys to the line (from 1) of its key."""

    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[tuple[str | int, ...], int] = field(default_factory=dict)


def parse(text: str, name: str) -> Document:
    """Parse a document whose top is a mapping (or empty). ConfigError with `name` and the line otherwise."""
    node = compose(text, name)
    document = Document()
    if node is None or (isinstance(node, yaml.ScalarNode) and scalar(node, name) is None):
        return document
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where(node, name)}: expected `key: value` lines at the top of the file")
    document.data = Builder(name, document.lines).build(node, ())
    return document


def parse_value(text: str, name: str) -> Any:
    """Parse one value, as on the command line."""
    node = compose(text, name)
    return None if node is None else Builder(name, {}).build(node, ())


def compose(text: str, name: str) -> yaml.Node | None:
    """The node tree of `text`; None when it is empty."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{name}: values are nested more than {DEEPEST} deep") from None


def where(node: yaml.Node, name: str) -> str:
    """file:line of a node."""
    return f"{name}:{node.start_mark.line + 1}"


class Builder:
    """Builds Python values from nodes and notes the line of every key."""

    def __init__(self, name: str, lines: dict[tuple[str | int, ...], int]) -> None:
        self.name = name
        self.lines = lines
        self.open: set[int] = set()
        self.nodes = 0

    def build(self, node: yaml.Node, path: tuple[str | int, ...]) -> Any:
        self.nodes += 1
        if id(node) in self.open or self.nodes > MOST_NODES:
            raise ConfigError(f"{where(node, self.name)}: an alias that contains itself, or too many values")
        if len(path) > DEEPEST:
            raise ConfigError(f"{where(node, self.name)}: values are nested more than {DEEPEST} deep")
        if node.tag not in TAGS:
            raise ConfigError(f"{where(node, self.name)}: tag {node.tag} is not allowed here")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return self.sequence(node, path)
            return scalar(node, self.name)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: tuple[str | int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{where(key_node, self.name)}: a key must be a plain word")
            key = key_node.value
            here = (*path, key)
            if key in result:
                first = self.lines.get(here)
                raise ConfigError(
                    f"{where(key_node, self.name)}: key {dotted(here)!r} is given twice"
                    + (f", first in line {first}" if first else "")
                )
            self.lines[here] = key_node.start_mark.line + 1
            result[key] = self.build(value_node, here)
        return result

    def sequence(self, node: yaml.SequenceNode, path: tuple[str | int, ...]) -> list[Any]:
        values = []
        for index, item in enumerate(node.value):
            self.lines[(*path, index)] = item.start_mark.line + 1
            values.append(self.build(item, (*path, index)))
        return values


def scalar(node: yaml.Node, name: str) -> Any:
    """null, bool, int, float or text, by the YAML 1.2 core schema; other tags are refused."""
    text = str(node.value)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where(node, name)}: unknown kind of value")
    if node.style is not None:
        return text
    if NULL.match(text):
        return None
    if BOOL.match(text):
        return text.lower() == "true"
    if INT.match(text):
        if len(text) > LONGEST:
            raise ConfigError(f"{where(node, name)}: a number of {len(text)} digits")
        return int(text.replace("_", ""))
    if FLOAT.match(text):
        value = float(text.replace("_", ""))
        if math.isfinite(value):
            return value
    if NOT_FINITE.match(text) or FLOAT.match(text):
        raise ConfigError(f"{where(node, name)}: {text} is not a finite number")
    return text


def dotted(path: tuple[str | int, ...]) -> str:
    """reward.functions.0.name"""
    return ".".join(str(part) for part in path)


def flow(value: Any) -> str:
    """A value on one line, such that `parse_value` (and a YAML 1.1 reader) gives it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(str(k))}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(v) for v in value) + "]"
    return quoted(str(value))


def number(value: float) -> str:
    """The shortest text that reads back as this float; YAML 1.1 wants a dot and a signed exponent."""
    text = repr(value)
    if "e" in text:
        mantissa, exponent = text.split("e")
        mantissa = mantissa if "." in mantissa else mantissa + ".0"
        exponent = exponent if exponent[0] in "+-" else "+" + exponent
        return f"{mantissa}e{exponent}"
    return text


def quoted(text: str) -> str:
    """Plain where no YAML reader can take it for anything else, double-quoted otherwise."""
    if PLAIN.match(text) and isinstance(yaml.safe_load(text), str) and isinstance(parse_value(text, ""), str):
        return text
    return yaml.dump(text, Dumper=yaml.SafeDumper, default_style='"', width=1 << 30, allow_unicode=True).rstrip("\n")
