"""The methods, by name. Plug-ins register factories under the entry point ``coterie.methods``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from coterie.errors import ConfigError, unknown
from coterie.layerwise import layer_wise
from coterie.method import Method
from coterie.methods.clustered import ifca, oracle
from coterie.methods.dc_pfl import dc_pfl
from coterie.methods.fedclust import fedclust
from coterie.methods.fedtsdp import fedtsdp
from coterie.methods.global_ import fedavg, fedprox, local
from coterie.methods.personal import fedper
from coterie.methods.user_centric import user_centric

__all__ = [
    "METHODS",
    "dc_pfl",
    "fedavg",
    "fedclust",
    "fedper",
    "fedprox",
    "fedtsdp",
    "find",
    "ifca",
    "local",
    "make",
    "oracle",
    "user_centric",
]

METHODS: dict[str, Callable[..., Method]] = {
    "local": local,
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedper": fedper,
    "ifca": ifca,
    "oracle": oracle,
    "fedclust": fedclust,
    "dc-pfl": dc_pfl,
    "fedtsdp": fedtsdp,
    "user-centric": user_centric,
}


def find(name: str) -> Callable[..., Method]:
    """The factory of a method, ours or a plug-in's."""
    if name in METHODS:
        return METHODS[name]
    plugins = {e.name: e for e in entry_points(group="coterie.methods")}
    if name in plugins:
        factory: Callable[..., Method] = plugins[name].load()
        return factory
    raise ConfigError(unknown("method", name, [*METHODS, *plugins]))


def make(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    layer_interval: int = 1,
    layer_share: float = 0.1,
) -> Method:
    """A method from its name and parameters; quiet layers are averaged every so many rounds.

    >>> make("fedprox", {"mu": 0.01}).name
    'fedprox'
    """
    method = find(name)(**(parameters or {}))
    if layer_interval == 1:
        return method
    if name == "dc-pfl":
        raise ConfigError("dc-pfl lets layers rest by itself: set method.alpha instead")
    if name == "fedtsdp":
        raise ConfigError(
            "fedtsdp runs whole models on the server in every round: no layer can rest"
        )
    return layer_wise(method, layer_interval, layer_share)
