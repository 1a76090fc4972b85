"""Names that users write in configs, mapped to objects; an unknown name is answered with its nearest neighbours."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from docklands.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A small table name -> object for one kind of thing ("reward", "algorithm", "model architecture").

    `modules` are imported at the first look-up, so that registering needs no import at start-up. A name of the form
    "package.module:attribute" is imported, which is how users bring their own.
    """

    def __init__(self, kind: str, modules: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self._modules = modules
        self._objects: dict[str, T] = {}

    def add(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Decorator: register an object under `name` and its aliases. ConfigError if one is taken."""

        def register(thing: T) -> T:
            for key in (name, *aliases):
                if self._objects.get(key, thing) is not thing:
                    raise ConfigError(f"{self.kind} {key!r} is registered twice")
                self._objects[key] = thing
            return thing

        return register

    def get(self, name: str) -> T:
        """The object called `name`, or the attribute that "package.module:attribute" names. Raises ConfigError."""
        self._load()
        if name in self._objects:
            return self._objects[name]
        if ":" in name:
            return import_string(name, self.kind)
        raise ConfigError(f"unknown {self.kind} {name!r}", nearest(name, list(self)))

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return list(self)

    def _load(self) -> None:
        modules, self._modules = self._modules, ()
        for module in modules:
            importlib.import_module(module)

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._objects

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._objects))


def import_string(name: str, kind: str = "object") -> T:  # pyright: ignore[reportInvalidTypeVarUse]
    """The object that "package.module:attribute" names; ConfigError says which part is missing."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{kind} {name!r} is not of the form package.module:attribute")
    try:
        thing = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{kind} {name!r}: {error}", "the module must be importable (installed, or on PYTHONPATH)"
        ) from error
    for part in attribute.split("."):
        if not hasattr(thing, part):
            close = nearest(part, [x for x in vars(thing) if not x.startswith("_")])
            raise ConfigError(f"{kind} {name!r}: {module_name} has no attribute {part!r}", close)
        thing = getattr(thing, part)
    return thing  # type: ignore[return-value]


def nearest(name: str, known: list[str]) -> str:
    """Hint for a misspelt name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + (", ".join(known) if known else "none")
