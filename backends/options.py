"""Storage options by their names: which a storage knows, and what was meant by one it does not.

Pure functions, called before anything is opened.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvshelf.errors import ConfigError


def mapping_of(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an option that is a mapping; empty when it is not set."""
    value = options.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"storage_options: {name} is {type(value).__name__}; expected a mapping")
    return value


def flattened(options: Mapping[str, Any], *nested: str) -> dict[str, Any]:
    """Return the options, with those of the mappings in `nested` under their names with dots.

    A mapping in a mapping is named with dots in `nested` as well.
    """
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name in nested:
            inner = [key[len(name) + 1 :] for key in nested if key.startswith(f"{name}.")]
            values = flattened(mapping_of(options, name), *inner)
            flat |= {f"{name}.{below}": value for below, value in values.items()}
        else:
            flat[name] = value
    return flat


def check_names(
    found: Iterable[str],
    known: Iterable[str],
    elsewhere: Mapping[str, str] | None = None,
    *,
    others: bool = False,
) -> None:
    """Refuse options that a storage does not know.

    Parameters
    ----------
    found, known : Iterable of str
        Names, with dots for those inside mappings.
    elsewhere : Mapping, optional
        What known options are called by other programs, without what precedes a dot.
    others : bool
        There are more that are not known by name: what is nearly a known one is refused.

    Raises
    ------
    ConfigError
        If there are some; says which known ones are the nearest.
    """
    names = list(known)
    # What was meant may be a mapping further in or out.
    meant = {name.rpartition(".")[2]: name for name in names} | {name: name for name in names}
    meant |= elsewhere or {}
    unknown = []
    for name in found:
        if name not in names:
            last = name.rpartition(".")[2]
            near = [
                *([last] if last in meant else ()),
                *difflib.get_close_matches(name, meant, n=1, cutoff=0.8 if others else 0.6),
                *difflib.get_close_matches(last, meant, n=1, cutoff=0.8 if others else 0.6),
            ]
            if others and not near:
                continue
            hint = f"did you mean {meant[near[0]]}?" if near else f"known: {', '.join(names)}"
            unknown.append(f"unknown storage option {name!r}; {hint}")
    if unknown:
        raise ConfigError("; ".join(unknown))


def parameters_of(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the parameters that a function takes by name, and whether it takes any other."""
    parameters = inspect.signature(function).parameters.values()
    return (
        [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ],
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
    )
