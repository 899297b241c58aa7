"""TOML: how configurations are read and written."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from coterie.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def to_toml(tree: Mapping[str, Any]) -> str:
    """Nested tables as TOML text; keys without a value are left out.

    >>> print(to_toml({"run": {"rounds": 5, "workers": None, "engine": "loop"}}), end="")
    [run]
    rounds = 5
    engine = "loop"
    """
    return tomli_w.dumps(_written(tree))


def _written(value: Any) -> Any:
    """A value as TOML can have it: without keys whose value is None, anything else as text."""
    if isinstance(value, Mapping):
        return {key: _written(v) for key, v in value.items() if v is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_written(v) for v in value]
    return value if isinstance(value, int | float) else str(value)
