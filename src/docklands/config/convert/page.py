"""The key tables of docs/howto/migrate_from_*.md, from the tables that convert."""

from __future__ import annotations

from docklands.config.convert.base import KINDS, Key, System

BEGIN, END = "<!-- made by docs/generate.py from the converter's table -->", "<!-- end of the table -->"


def render_table(system: System) -> str:
    """Markdown: keys that are mapped, then those that are not needed, then those without a counterpart."""
    lines = [BEGIN, ""]
    for kind in KINDS:
        keys = [key for key in system.keys if key.kind == kind]
        lines += [f"### {kind.capitalize()}", ""]
        lines += mapped(keys, system) if kind == "mapped" else grouped(keys)
        lines.append("")
    return "\n".join([*lines, END])


def mapped(keys: list[Key], system: System) -> list[str]:
    """Each key with what it becomes."""
    rows = ["| key | ours | remark |", "|---|---|---|"]
    for key in keys:
        default = system.defaults.get(key.name)
        said = "; ".join(filter(None, (key.note, f"absent: {default}" if default is not None else "")))
        rows.append(f"| `{key.name}` | {', '.join(f'`{name}`' for name in key.ours)} | {escaped(said)} |")
    return rows


def grouped(keys: list[Key]) -> list[str]:
    """Keys with one reason share a row."""
    reasons: dict[str, list[str]] = {}
    for key in keys:
        neutral = [str(value) for value in key.neutral if value is not None]
        alone = f"; {' or '.join(neutral)} asks for nothing" if neutral else ""
        reasons.setdefault(key.note + alone, []).append(f"`{key.name}`")
    head = ["| reason | keys |", "|---|---|"]
    return head + [
        f"| {escaped(note)} | {', '.join(escaped(name) for name in names)} |" for note, names in reasons.items()
    ]


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def with_table(page: str, system: System) -> str:
    """The page with its table made anew; the page must hold both marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + render_table(system) + tail
