"""Configurations of other systems as ours: `docklands config convert FILE --from SYSTEM`.

A system is a table. Each of its keys is mapped to keys of ours, or not needed (and why), or not supported (and what to
do instead). A key that the table does not know is told too: nothing that the user wrote disappears without a word. The
same tables are the pages docs/howto/migrate_from_*.md.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from docklands.config import yaml_io
from docklands.config.explain import shown
from docklands.config.load import make_config
from docklands.config.schema import Config
from docklands.errors import ConfigError

Kind = Literal["mapped", "not needed", "not supported"]
KINDS: tuple[Kind, ...] = ("mapped", "not needed", "not supported")
UNKNOWN = "unknown to the table: look for its meaning in docs/reference/config.md"
EVALUATED = "an expression; write its value"


@dataclass(frozen=True)
class Key:
    """One key of another system, or several by a pattern with *.

    ours     dotted keys of ours that it decides
    change   their value -> ours; None: a rule of the system reads it together with others
    neutral  values of an unsupported key that ask for nothing
    """

    name: str
    kind: Kind
    ours: tuple[str, ...] = ()
    note: str = ""
    change: Callable[[Any], Any] | None = None
    neutral: tuple[Any, ...] = ()


def same(value: Any) -> Any:
    return value


def whole(value: Any) -> int:
    """A whole number, also where it is written as 1e3. ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError("expected a whole number")
    return int(value)


def number(value: Any) -> float:
    """ValueError for anything but a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a number")
    return float(value)


def flag(value: Any) -> bool:
    """ValueError for anything but true and false."""
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def text(value: Any) -> str:
    """ValueError for anything but text."""
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value


def one_of(words: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """A translation word by word; ValueError for another word."""

    def change(value: Any) -> Any:
        for known, ours in words.items():
            if type(known) is type(value) and known == value:
                return ours
        raise ValueError(f"expected {', '.join(map(shown, words))}")

    return change


def to(name: str, ours: str, change: Callable[[Any], Any] = same, note: str = "") -> Key:
    """A key that becomes one of ours by itself."""
    return Key(name, "mapped", (ours,), note, change)


def rule(name: str, ours: str, note: str) -> Key:
    """A key that the system's rule reads; `ours`: keys that it takes part in, with spaces between."""
    return Key(name, "mapped", tuple(ours.split()), note)


def drop(note: str, names: str) -> list[Key]:
    """Keys that we do not need; `names` with spaces between."""
    return [Key(name, "not needed", (), note) for name in names.split()]


def lack(note: str, names: str, *neutral: Any) -> list[Key]:
    """Keys that we do not support, and the values of them that ask for nothing."""
    return [Key(name, "not supported", (), note, neutral=(None, *neutral)) for name in names.split()]


@dataclass
class Given:
    """What the user wrote, as a rule sees it: flat, with the system's own defaults below.

    ours      dotted keys of ours, so far
    remarks   their key -> what became of it where the table alone does not say
    read      their keys that a rule asked for
    """

    values: dict[str, Any]
    defaults: Mapping[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        self.read.add(name)
        return self.values.get(name) is not None

    def get(self, name: str, kind: Callable[[Any], Any], other: Any = None) -> Any:
        """The value of a key as `kind` makes it, else the system's default, else `other`. ConfigError."""
        self.read.add(name)
        value = self.values.get(name)
        if value is None:
            value = self.defaults.get(name)
        return other if value is None else translated(name, value, kind)

    def put(self, ours: str, value: Any) -> None:
        self.ours[ours] = value

    def refuse(self, name: str, note: str) -> None:
        """This value of a mapped key has no counterpart."""
        if name in self.values:
            self.remarks[name] = ("not supported", note)


def translated(name: str, value: Any, kind: Callable[[Any], Any]) -> Any:
    try:
        return kind(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{name}: got {shown(value)}: {error}") from None


@dataclass(frozen=True)
class System:
    """Another system's configuration.

    title     its name for people; source: where its keys are documented
    keys      exact names first, then patterns
    combine   what several keys say together
    defaults  values that it takes for keys that are not given, where ours would be another
    alias     their name -> the name under which the table has it
    """

    name: str
    title: str
    source: str
    keys: tuple[Key, ...]
    combine: Callable[[Given], None]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    alias: Callable[[str], str] = same

    def find(self, name: str) -> Key | None:
        """The table's row for a key: by its name, else by the first pattern that fits."""
        wanted = self.alias(name)
        exact = next((key for key in self.keys if key.name == wanted), None)
        return exact or next((k for k in self.keys if "*" in k.name and fnmatch.fnmatchcase(wanted, k.name)), None)


@dataclass(frozen=True)
class Line:
    """What became of one key that the user wrote (or that the system takes by default)."""

    name: str
    value: Any
    kind: Kind
    ours: tuple[str, ...]
    note: str
    default: bool = False


@dataclass(frozen=True)
class Converted:
    """The result: our keys, and one line for each key of theirs."""

    system: System
    ours: dict[str, Any]
    lines: tuple[Line, ...]
    config: Config

    def to_yaml(self) -> str:
        """A file that `docklands train` reads, with what was not carried over as comments."""
        out = [f"# Converted from {self.system.title} by `docklands config convert`."]
        sections: dict[str, dict[str, Any]] = {}
        for name, value in self.ours.items():
            section, _, rest = name.partition(".")
            nest(sections.setdefault(section, {}), rest.split("."), value)
        for section in (name for name in Config.model_fields if name in sections):
            out.append(f"{section}:")
            out += [f"  {key}: {yaml_io.flow(value)}" for key, value in sections[section].items()]
        for kind in KINDS[::-1]:
            chosen = [
                line for line in self.lines if line.kind == kind and (line.note or line.default or kind != "mapped")
            ]
            if chosen:
                out += ["", f"# {'Mapped, with a remark' if kind == 'mapped' else kind.capitalize()}:"]
                out += [f"#   {describe(line)}" for line in chosen]
        return "\n".join(out) + "\n"

    def count(self, kind: Kind) -> int:
        return sum(line.kind == kind and not line.default for line in self.lines)


def describe(line: Line) -> str:
    """name: value (their default) -> ours: note. A comment is one line, whatever is in a name."""
    said = f"{line.name}: {one_line(line.value)}" + (" (their default)" if line.default else "")
    target = f" -> {', '.join(line.ours)}" if line.ours and line.kind == "mapped" else ""
    said += target + (f": {line.note}" if line.note else "")
    return "".join(letter if letter.isprintable() else " " for letter in said)


def one_line(value: Any) -> str:
    try:
        return " ".join(yaml_io.flow(value).split())
    except (TypeError, ValueError):
        return shown(value)


def nest(section: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value at a path of nested mappings."""
    for part in path[:-1]:
        section = section.setdefault(part, {})
    section[path[-1]] = value


def flatten(data: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterable[tuple[str, Any]]:
    """(dotted key, value) of every leaf; lists and empty mappings are leaves."""
    for key, value in data.items():
        here = (*at, str(key))
        if isinstance(value, dict) and value:
            yield from flatten(value, here)
        else:
            yield ".".join(here), value


def is_expression(value: Any) -> bool:
    """A reference to another key, a shell variable or a value that must be given: nothing to translate."""
    return isinstance(value, str) and ("$" in value or value == "???" or value.startswith("<expression"))


def is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether the value asks for nothing: 0 and false are told apart, 0 and 0.0 are not."""
    return any(
        value == known and isinstance(value, bool) == isinstance(known, bool) and (value is None) == (known is None)
        for known in neutral
    )


def convert(values: Mapping[str, Any], system: System) -> Converted:
    """Flat values of another system -> ours, checked as a file would be. ConfigError for what cannot be read, and for
    values that contradict each other once they are ours."""
    usable = {system.alias(k): v for k, v in values.items() if not is_expression(v)}
    usable |= {k: v for k, v in values.items() if k == system.alias(k) and not is_expression(v)}
    given = Given(usable, system.defaults)
    rows = {**dict.fromkeys(system.defaults), **dict.fromkeys(usable)}
    for name in rows:
        key = system.find(name)
        value = usable.get(name) if usable.get(name) is not None else system.defaults.get(name)
        if key and key.kind == "mapped" and key.change and value is not None:
            given.put(key.ours[0], translated(name, value, key.change))
    system.combine(given)
    ours = {name: value for name, value in given.ours.items() if value is not None}
    lines = [line_of(name, value, system, given) for name, value in values.items()]
    for name, value in system.defaults.items():
        key = system.find(name)
        if usable.get(name) is None and key is not None and any(name in ours for name in key.ours):
            lines.append(Line(name, value, "mapped", key.ours, key.note, default=True))
    data: dict[str, Any] = {}
    for name, value in ours.items():
        nest(data, name.split("."), value)
    try:
        config, _ = make_config(data)
    except ConfigError as error:
        said = "\n".join(line.removesuffix(" (python)") for line in error.message.splitlines())
        hint = error.hint or "these are the translated values; change what they come from, and convert again"
        raise ConfigError(said, hint) from None
    return Converted(system, ours, tuple(lines), config)


def line_of(name: str, value: Any, system: System, given: Given) -> Line:
    """What became of one key."""
    key, wanted = system.find(name), system.alias(name)
    if is_expression(value):
        return Line(name, value, "not supported", (), EVALUATED)
    if key is None:
        return Line(name, value, "not supported", (), UNKNOWN)
    if wanted != name and given.values.get(wanted, value) != value:
        return Line(name, value, "not needed", (), f"{wanted} says otherwise and comes first")
    if wanted in given.remarks:
        kind, note = given.remarks[wanted]
        return Line(name, value, kind, key.ours if kind == "mapped" else (), note)
    if key.kind == "not supported" and is_neutral(value, key.neutral):
        return Line(name, value, "not needed", (), "asks for nothing")
    if key.kind == "mapped" and value is None:
        return Line(name, value, "not needed", (), "null: ours decides")
    unread = key.kind == "mapped" and key.change is None and wanted not in given.read
    if unread or (key.kind == "mapped" and not any(given.ours.get(name) is not None for name in key.ours)):
        return Line(name, value, "not needed", (), "changes nothing together with the other keys")
    return Line(name, value, key.kind, key.ours, key.note)


# --- what several systems share -----------------------------------------------------------------------------------


def put_budget(given: Given, tokens: int | None) -> None:
    """train.tokens_per_microbatch: theirs, but never below the longest sample, which ours does not cut."""
    longest = given.ours.get("data.max_prompt_tokens", 1024) + given.ours.get("rollout.max_response_tokens", 512)
    if tokens is not None or longest > 8192:
        given.put("train.tokens_per_microbatch", max(tokens or 0, longest))


def put_warmup(given: Given, fraction: float | None, updates: int | None, steps: int | None) -> None:
    """Warm-up as optimizer updates. fraction: of the whole run's updates; updates: as given, when not negative."""
    if updates is not None and updates >= 0:
        given.put("train.optim.warmup_updates", updates)
    elif fraction and steps:
        given.put("train.optim.warmup_updates", math.ceil(fraction * steps * updates_per_step(given)))


def updates_per_step(given: Given) -> int:
    """By our keys so far."""
    samples = given.ours.get("rollout.prompts_per_step", 16) * given.ours.get("rollout.samples_per_prompt", 8)
    each = given.ours.get("algorithm.samples_per_update") or samples
    return given.ours.get("algorithm.epochs_per_step", 1) * math.ceil(samples / each)


def keep_readable(given: Given, algorithm: str) -> None:
    """Keys that our algorithm does not read must not be set: the rest of the table would ask for something that does
    nothing."""
    unread = {"algorithm.lam", "algorithm.value_clip", "algorithm.critic_warmup_steps"} if algorithm != "ppo" else set()
    unread |= {"algorithm.gamma"} if algorithm not in ("ppo", "reinforce_pp") else set()
    unread |= {"algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip"} if algorithm == "rloo" else set()
    grouped = algorithm not in ("ppo", "reinforce_pp")
    unread |= {"algorithm.normalize_std"} if not grouped else set()
    for name in unread:
        given.ours.pop(name, None)
    if algorithm != "ppo":
        for name in [name for name in given.ours if name.startswith("critic.")]:
            del given.ours[name]
    if not given.ours.get("algorithm.kl.coef"):
        for name in [name for name in given.ours if name.startswith(("algorithm.kl.", "reference."))]:
            del given.ours[name]
