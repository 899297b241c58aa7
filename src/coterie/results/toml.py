"""TOML: how configurations are read and written."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def to_toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """Nested tables as TOML text; keys without a value are left out.

    >>> print(to_toml({"run": {"rounds": 5, "workers": None, "engine": "loop"}}), end="")
    [run]
    rounds = 5
    engine = "loop"
    """
    lines, tables = [], []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            name = f"{prefix}{_toml_key(key)}"
            body = to_toml(value, f"{name}.")
            if body:
                tables.append(f"[{name}]\n{body}" if not body.startswith("[") else body)
        elif value is not None and (value != {} or prefix):
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}\n")
    return "".join(lines) + "\n".join(tables)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_text(text: str) -> str:
    # JSON escapes as TOML does, but lets DEL through.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_toml_value(v) for v in value)}]"
    return repr(value) if isinstance(value, int | float) else _toml_text(str(value))
