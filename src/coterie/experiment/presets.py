"""Presets: methods of the literature that are another method with certain settings.

A preset is used by name, like a method. The user's settings override its own, and it needs no
code: FedPAQ is FedAvg with a number of local steps, partial participation and a codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.errors import ConfigError, unknown


@dataclass(frozen=True)
class Preset:
    """Settings by table; ``parameters`` are those that can be set like a method's parameters."""

    about: str
    reference: str
    tree: Mapping[str, Mapping[str, Any]]
    parameters: Mapping[str, str]


PRESETS = {
    "fedpaq": Preset(
        "FedAvg of quantised updates: 5 local steps, half of the clients in a round, qsgd uploads.",
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
    """A configuration with a preset's name replaced by its method and settings.

    >>> tree = expanded({"method": {"name": "fedpaq", "steps": 9}, "train": {"lr": 0.1}})
    >>> tree["method"], tree["train"]
    ({'name': 'fedavg'}, {'steps': 9, 'lr': 0.1})
    """
    method = tree.get("method")
    name = method.get("name") if isinstance(method, Mapping) else None
    if not isinstance(name, str) or name not in PRESETS:
        return tree
    preset, parameters = PRESETS[name], dict(method)  # type: ignore[arg-type]
    settings = {table: dict(values) for table, values in preset.tree.items()}
    settings["method"] |= {k: parameters.pop(k) for k in list(parameters) if k.startswith("layer_")}
    del parameters["name"]
    for key, value in parameters.items():
        if key not in preset.parameters:
            raise ConfigError(unknown(f"parameter of {name}", key, preset.parameters))
        table, _, leaf = preset.parameters[key].partition(".")
        settings[table][leaf] = value
    for table, values in tree.items():
        if table != "method" and isinstance(values, Mapping):
            settings[table] = {**settings.get(table, {}), **values}
        elif table != "method":
            settings[table] = values
    return settings


def explained(name: str) -> list[str]:
    """The lines that explain a preset: what it is, its settings and its parameters."""
    preset = PRESETS[name]
    settings = [f"{t}.{k} = {v}" for t, values in preset.tree.items() for k, v in values.items()]
    return [
        f"{name}: {preset.about}",
        f"it is: {', '.join(settings)}",
        f"its parameters: {', '.join(f'{k} ({v})' for k, v in preset.parameters.items())}",
        preset.reference,
    ]
