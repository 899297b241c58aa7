"""Presets: methods of the literature that are another method with certain settings.

A preset is written where a method's name goes. It lays its settings under the user's own, and has
no code: FedPAQ is FedAvg, some steps, a part of the clients, and a codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.errors import ConfigError, unknown


@dataclass(frozen=True)
class Preset:
    """Settings by table; ``parameters`` are those that can be written as the method's own."""

    about: str
    reference: str
    tree: Mapping[str, Mapping[str, Any]]
    parameters: Mapping[str, str]


PRESETS = {
    "fedpaq": Preset(
        "FedAvg of quantised changes: 5 local steps, half of the clients a round, qsgd up.",
        "Reisizadeh et al., FedPAQ: A Communication-Efficient Federated Learning Method with "
        "Periodic Averaging and Quantization, AISTATS 2020.",
        {
            "method": {"name": "fedavg"},
            "train": {"steps": 5},
            "run": {"cohort": 0.5},
            "wire": {"up": "qsgd"},
        },
        {"steps": "train.steps", "cohort": "run.cohort", "codec": "wire.up"},
    ),
}


def expanded(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration in which a preset's name is replaced by what it stands for.

    >>> found = expanded({"method": {"name": "fedpaq", "steps": 9}, "train": {"lr": 0.1}})
    >>> found["method"], found["train"]
    ({'name': 'fedavg'}, {'steps': 9, 'lr': 0.1})
    """
    method = tree.get("method")
    name = method.get("name") if isinstance(method, Mapping) else None
    if not isinstance(name, str) or name not in PRESETS:
        return tree
    preset, given = PRESETS[name], dict(method)  # type: ignore[arg-type]
    found = {table: dict(values) for table, values in preset.tree.items()}
    found["method"] |= {k: given.pop(k) for k in list(given) if k.startswith("layer_")}
    del given["name"]
    for key, value in given.items():
        if key not in preset.parameters:
            raise ConfigError(unknown(f"parameter of {name}", key, preset.parameters))
        table, _, leaf = preset.parameters[key].partition(".")
        found[table][leaf] = value
    for table, values in tree.items():
        if table != "method" and isinstance(values, Mapping):
            found[table] = {**found.get(table, {}), **values}
        elif table != "method":
            found[table] = values
    return found


def described(name: str) -> list[str]:
    """A preset in a few lines: what it is, its settings, how to change them."""
    preset = PRESETS[name]
    settings = [f"{t}.{k} = {v}" for t, values in preset.tree.items() for k, v in values.items()]
    return [
        f"{name}: {preset.about}",
        f"it is: {', '.join(settings)}",
        f"its parameters: {', '.join(f'{k} ({v})' for k, v in preset.parameters.items())}",
        preset.reference,
    ]
