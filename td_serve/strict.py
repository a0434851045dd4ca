"""Plain data into structs, strictly: what is wrong is named by its path, with what stood there and
what was expected. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

_LONGEST_SHOWN = 200
"""Characters of a value that is shown."""


class Fault(ValueError):
    """What a struct finds wrong at `place` below itself (`.tenants.acme[0]`)."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(what)
        self.place = place


class Wrong(ValueError):
    """Data that does not fit; `path` is that of the first thing that is wrong."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


def decode(value: object, kind: type[T], *, path: str, secret: str | None = None) -> T:
    """Decode plain data into `kind`. `path` names where the data stands, for errors; what stands
    below `secret` is not shown.

    Raises Wrong.
    """
    if unknown := unknown_keys(value, kind, path):
        said = [
            f"{place}: unknown key {name!r}, {nearest(name, known)}"
            for place, name, known in unknown
        ]
        raise Wrong("\n".join(said), unknown[0][0].strip("."))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        fault = error.__cause__
        # msgspec says "Expected `int`, got `str` - at `$.engine.seed`".
        # And of a mapping's key "- at `key` in `$.env`".
        what, _, place = str(error).partition(" - at ")
        where = place.rpartition("`$")[2].removesuffix("`")
        if isinstance(fault, Fault):
            there, why = f"{path}{where}{fault.place}", str(fault)
        else:
            there = f"{path}{where}"
            why = _explained(what, value, kind, place, where, secret)
        there = there.strip(".")
        raise Wrong(f"{there}: {why}" if there else why, there) from None


def _explained(
    what: str, value: object, kind: Any, place: str, where: str, secret: str | None
) -> str:
    """msgspec's `what`, with the value that stood there, or the values that might."""
    if "[...]" in where:
        return what  # msgspec does not say under which key: there is no value to show
    found = _lookup(value, where)
    if place.startswith("`key`"):
        # Its values are nobody's business here: among tenants they could be keys.
        wrong = [key for key in found if not isinstance(key, str)]
        return f"a name: {what}, got {', '.join(map(repr, wrong))} (quote it)"
    choices = [str(one) for one in _choices(kind, where)]
    if choices and isinstance(found, str | bool | int):
        near = difflib.get_close_matches(str(found), choices, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{found!r}, {hint}expected one of {', '.join(choices)}"
    if (secret is not None and where.startswith(secret)) or len(repr(found)) > _LONGEST_SHOWN:
        return what
    return f"{what}, got {found!r}{_hint(what, found)}"


def _hint(what: str, found: object) -> str:
    """YAML reads `1e-3` as text."""
    if "Expected `float`" in what and isinstance(found, str):
        try:
            number = float(found)
        except ValueError:
            return ""
        return f", which is text: write {number:.10f}".rstrip("0")
    return ""


def _choices(kind: Any, where: str) -> tuple[Any, ...]:
    """What the `Literal` at msgspec's path (`.reuse.rule`) allows; nothing where there is none."""
    for step in where.strip(".").split("."):
        struct = _struct_of(kind)
        kind = None if struct is None else get_type_hints(struct).get(step)
    return get_args(kind) if get_origin(kind) is Literal else ()


def unknown_keys(value: object, kind: Any, path: str) -> list[tuple[str, str, list[str]]]:
    """Every key in `value` that `kind` lacks: (path of the key, the key, keys known there)."""
    struct = _struct_of(kind)
    if struct is not None and isinstance(value, list | tuple):
        return [
            wrong
            for place, item in enumerate(value)
            for wrong in unknown_keys(item, struct, f"{path}[{place}]")
        ]
    if struct is None or not isinstance(value, Mapping):
        return []
    hints = get_type_hints(struct)
    known = [field.encode_name for field in msgspec.structs.fields(struct)]
    found = []
    for key, item in value.items():
        if key not in known:
            found.append((f"{path}.{key}", str(key), known))
        else:
            found += unknown_keys(item, hints[key], f"{path}.{key}")
    return found


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """The struct in `Struct`, `Struct | None`, `list[Struct]` or `Annotated[Struct, …]`, if there
    is one."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    if get_origin(kind) is not None:
        for part in get_args(kind):
            if (struct := _struct_of(part)) is not None:
                return struct
    return None


def _lookup(value: Any, path: str) -> Any:
    """The part of `value` at msgspec's path (`.engine.seed`, `.port_range[0]`)."""
    for step in path.replace("[", ".[").strip(".").split("."):
        if step.startswith("["):
            value = value[int(step.strip("[]"))]
        elif step and isinstance(value, Mapping):
            value = value.get(step)
    return value


def nearest(name: str, known: list[str]) -> str:
    """A hint for a misspelt name: "did you mean 'x'?", or what is valid."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"valid keys are {', '.join(sorted(known))}"
