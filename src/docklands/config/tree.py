"""The schema as a tree of keys: which section stands where, which leaves exist."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from docklands.config.schema import Config, Section

PathKey = tuple[str | int, ...]
MISSING: Any = object()


def as_section(kind: Any) -> type[Section] | None:
    """`kind` if it is a section class."""
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def item_kind(info: FieldInfo) -> type[Section] | None:
    """The section class of a list-of-sections field."""
    if typing.get_origin(info.annotation) is list:
        return as_section(typing.get_args(info.annotation)[0])
    return None


def section_of(path: PathKey) -> type[Section] | None:
    """The section class at `path` (the whole config at ()); None for a leaf or a path that is not there."""
    section: type[Section] = Config
    index = 0
    while index < len(path):
        info = section.model_fields.get(str(path[index]))
        if info is None:
            return None
        inner = as_section(info.annotation)
        if inner is None:
            inner = item_kind(info)
            index += 1
            if inner is None or index >= len(path) or not isinstance(path[index], int):
                return None
        section = inner
        index += 1
    return section


def item_section(path: PathKey) -> type[Section] | None:
    """The section class of the items of the list at `path`."""
    parent = section_of(path[:-1]) if path else None
    info = parent.model_fields.get(str(path[-1])) if parent else None
    return item_kind(info) if info else None


def lookup(path: PathKey, data: dict[str, Any]) -> Any:
    """The field, section or item that an override names; MISSING when the schema (or the list) has none.

    Inside a free mapping (`args`) any key may be set; a list item must exist in `data`.
    """
    for length in range(1, len(path) + 1):
        head = path[:length]
        if isinstance(head[-1], int):
            if not has_item(head, data):
                return MISSING
            continue
        parent = section_of(head[:-1])
        info = parent.model_fields.get(str(head[-1])) if parent else None
        if info is None:
            return MISSING
        if typing.get_origin(info.annotation) is dict:
            return info
        if as_section(info.annotation) is None and item_kind(info) is None:
            return info if length == len(path) else MISSING
    return section_of(path) or item_section(path)


def has_item(path: PathKey, data: Any) -> bool:
    """Whether the list item at `path` was given."""
    for key in path:
        if isinstance(key, int):
            if not isinstance(data, list) or key >= len(data):
                return False
            data = data[key]
        else:
            data = data.get(key) if isinstance(data, dict) else None
    return isinstance(data, dict)


def schema_leaves(section: type[Section] = Config, at: tuple[str, ...] = ()) -> Iterator[tuple[str, FieldInfo]]:
    """(dotted path, field) of every leaf of the schema; items of a list of sections as `name[]`."""
    for name, info in section.model_fields.items():
        inner, item = as_section(info.annotation), item_kind(info)
        if inner is not None:
            yield from schema_leaves(inner, (*at, name))
        elif item is not None:
            yield from schema_leaves(item, (*at, f"{name}[]"))
        else:
            yield ".".join((*at, name)), info


def schema_sections(section: type[Section] = Config, at: tuple[str, ...] = ()) -> Iterator[tuple[str, type[Section]]]:
    """(dotted path, class) of every section but the top, outer before inner."""
    for name, info in section.model_fields.items():
        inner, item = as_section(info.annotation), item_kind(info)
        if inner is not None or item is not None:
            path = (*at, name if inner is not None else f"{name}[]")
            kind = typing.cast("type[Section]", inner or item)
            yield ".".join(path), kind
            yield from schema_sections(kind, path)
