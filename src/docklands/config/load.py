"""YAML files and dotted overrides -> Config, with the source of every value.

Rules: sections merge, values replace (a list or an `args` mapping is one value); `extends: other.yaml` is read first,
relative to the file that names it; overrides `a.b=value` come last. Nothing is read from the environment.
A source is "default", "file:line", "extends file:line" or "command line".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from docklands.config import yaml_io
from docklands.config.explain import explain, shown, unknown_key
from docklands.config.schema import Config, Section
from docklands.config.tree import MISSING, item_section, lookup, section_of
from docklands.errors import ConfigError

COMMAND_LINE = "command line"
DEFAULT = "default"
EXTENDS = "extends"

PathKey = tuple[str | int, ...]


@dataclass
class Draft:
    """Values before validation: nested data, and where each given path came from."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[PathKey, str] = field(default_factory=dict)

    def origin(self, path: PathKey) -> str:
        """The source of the nearest given ancestor of `path`; "default" if nothing above it was given."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return DEFAULT

    def source(self, path: PathKey) -> str:
        """The source of a leaf; of a mapping, also where its keys were set one by one."""
        below = [o for p, o in self.origins.items() if len(p) > len(path) and p[: len(path)] == path]
        own = self.origins.get(path)
        if own is not None:
            below = [o for o in below if o == COMMAND_LINE and own != COMMAND_LINE]
        return " + ".join(dict.fromkeys([own, *below] if own else below)) or DEFAULT

    def put(self, path: PathKey, value: Any) -> None:
        """Set the value at `path`, making the sections above it; forget older origins below it.

        ConfigError when something above it was given as a plain value.
        """
        target: Any = self.data
        for depth, key in enumerate(path):
            if not isinstance(target, dict) and not (isinstance(target, list) and isinstance(key, int)):
                name = yaml_io.dotted(path[:depth])
                place = self.origin(path[:depth])
                raise ConfigError(f"{name}: got {shown(target)}, expected a section (a mapping of keys) ({place})")
            if depth < len(path) - 1:
                target = target.setdefault(key, {}) if isinstance(target, dict) else target[int(key)]
            elif isinstance(target, dict):
                target[key] = value
            else:
                target[int(key)] = value
        for known in [p for p in self.origins if p[: len(path)] == path]:
            del self.origins[known]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """Read a YAML file and apply overrides; returns the config and the source of every leaf.

    Raises ConfigError: one line per fault, with the dotted path, the value and file:line.
    """
    draft = Draft()
    read_file(Path(path), draft, seen=(), prefix="")
    return finish(draft, overrides)


def make_config(data: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """A config from nested Python values, checked as strictly as a file."""
    draft = Draft()
    merge(draft, dict(data or {}), (), lambda _: "python")
    return finish(draft, overrides)


def finish(draft: Draft, overrides: Sequence[str]) -> tuple[Config, dict[str, str]]:
    """Apply overrides and validate."""
    for text in overrides:
        apply_override(draft, text)
    try:
        # JSON mode: lists serve as tuples, yet "1" is no number and 1 is no text.
        config = Config.model_validate_json(json.dumps(draft.data), strict=True)
    except ValidationError as error:
        raise explain(error, draft.origin) from None
    sources = {yaml_io.dotted(path): draft.source(path) for path, _ in leaves(config)}
    return config, sources


def read_file(path: Path, draft: Draft, seen: tuple[Path, ...], prefix: str) -> None:
    """Merge a file, and first the files that it extends, into the draft."""
    text = read_text(path)
    document = yaml_io.parse(text, str(path))
    bases = document.data.pop(EXTENDS, None)
    place = f"{path}:{document.lines.get((EXTENDS,), 1)}"
    resolved = path.resolve()
    for base in bases if isinstance(bases, list) else [] if bases is None else [bases]:
        if not isinstance(base, str):
            raise ConfigError(f"{place}: extends: expected a file name or a list of them, got {base!r}")
        target = path.parent / base
        if target.resolve() in (*seen, resolved):
            raise ConfigError(f"{place}: extends: {base} extends itself", "break the circle of `extends`")
        if not target.is_file():
            raise ConfigError(f"{place}: extends: no file {target}", "the path is relative to the file that names it")
        read_file(target, draft, (*seen, resolved), "extends ")

    def origin(at: PathKey) -> str:
        line = next((document.lines[at[:n]] for n in range(len(at), 0, -1) if at[:n] in document.lines), 1)
        return f"{prefix}{path}:{line}"

    merge(draft, document.data, (), origin)


def read_text(path: Path) -> str:
    """The text of a file; ConfigError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError(f"no file {path}", f"files there: {', '.join(near[:8])}" if near else "") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}") from None


def merge(draft: Draft, data: dict[str, Any], at: PathKey, origin: Any) -> None:
    """Merge a mapping into the section at `at`; unknown keys are errors, values replace."""
    section = section_of(at)
    assert section is not None
    for key, value in data.items():
        path = (*at, key)
        if key not in section.model_fields:
            raise unknown_key(path, origin(path))
        if section_of(path) is not None and (value is None or isinstance(value, dict)):
            merge(draft, value or {}, path, origin)
            continue
        check_items(path, value, origin)
        draft.put(path, value)
        for leaf in paths_below(path, value):
            draft.origins[leaf] = origin(leaf)


def check_items(path: PathKey, value: Any, origin: Any) -> None:
    """Unknown keys in a list of sections (reward.functions)."""
    item = item_section(path)
    if item is None or not isinstance(value, list):
        return
    for index, entry in enumerate(value):
        for key in entry if isinstance(entry, dict) else ():
            if key not in item.model_fields:
                raise unknown_key((*path, index, key), origin((*path, index, key)))


def paths_below(path: PathKey, value: Any) -> Iterator[PathKey]:
    """The path of a value and of everything in it."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_below((*path, key), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths_below((*path, index), inner)


def apply_override(draft: Draft, text: str) -> None:
    """`a.b=value`, the value parsed as YAML."""
    name, equals, raw = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"override {text!r} is not of the form key=value", "for example algorithm.clip_high=0.28")
    path: PathKey = tuple(int(part) if part.isdigit() else part for part in name.strip().split("."))
    value = yaml_io.parse_value(raw, f"override {name.strip()}")
    known = lookup(path, draft.data)
    if known is MISSING:
        raise unknown_key(path, COMMAND_LINE)
    if section_of(path) is not None and (value is None or isinstance(value, dict)):
        merge(draft, value or {}, path, lambda _: COMMAND_LINE)
        return
    check_items(path, value, lambda _: COMMAND_LINE)
    draft.put(path, value)
    for leaf in paths_below(path, value):
        draft.origins[leaf] = COMMAND_LINE


def leaves(section: Section, at: PathKey = ()) -> Iterator[tuple[PathKey, Any]]:
    """(path, value) of every leaf: sections and lists of sections are walked, everything else is one value."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, (*at, name))
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            for index, entry in enumerate(value):
                yield from leaves(entry, (*at, name, index))
        else:
            yield (*at, name), value


def diff_configs(left: Config, right: Config) -> list[tuple[str, Any, Any]]:
    """(dotted path, left value, right value) of every leaf that differs; a leaf only one has is None in the other."""
    a = {yaml_io.dotted(path): value for path, value in leaves(left)}
    b = {yaml_io.dotted(path): value for path, value in leaves(right)}
    return [(key, a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]


def resolved_yaml(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """The whole config as YAML, one leaf a line, its source as a trailing comment. Loading it gives `config` back."""
    rows: list[tuple[str, str]] = []
    emit(config, (), "", rows, sources or {})
    width = min(max((len(line) for line, source in rows if source), default=0), 60)
    return "".join(f"{line:<{width}}  # {source}\n" if source else f"{line}\n" for line, source in rows)


def emit(section: Section, at: PathKey, indent: str, rows: list[tuple[str, str]], sources: Mapping[str, str]) -> None:
    """Append (line, source) for a section's keys."""
    for name in type(section).model_fields:
        value, path = getattr(section, name), (*at, name)
        if isinstance(value, Section):
            rows.append((f"{indent}{name}:", ""))
            emit(value, path, indent + "  ", rows, sources)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            rows.append((f"{indent}{name}:", ""))
            for index, entry in enumerate(value):
                start = len(rows)
                emit(entry, (*path, index), indent + "    ", rows, sources)
                line, source = rows[start]
                rows[start] = (f"{indent}  - {line.lstrip()}", source)
        else:
            source = " ".join(sources.get(yaml_io.dotted(path), "").split())
            rows.append((f"{indent}{name}: {yaml_io.flow(value)}", source))
