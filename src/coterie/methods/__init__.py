"""The methods, by name. Plug-ins register factories under the entry point ``coterie.methods``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, Literal

from coterie.compose import combined
from coterie.errors import ConfigError, unknown
from coterie.layerwise import layer_wise
from coterie.method import Method, Source, exclusive_sets
from coterie.methods.adaptive_tau import adaptive_tau
from coterie.methods.cfl import cfl
from coterie.methods.clustered import ifca, oracle
from coterie.methods.control import feddyn, scaffold
from coterie.methods.dc_pfl import dc_pfl
from coterie.methods.fedclust import fedclust
from coterie.methods.fedfomo import fedfomo
from coterie.methods.fednova import fednova
from coterie.methods.fedtsdp import fedtsdp
from coterie.methods.global_ import fedavg, fedprox, local
from coterie.methods.group_evidence import group_evidence
from coterie.methods.k_fed import k_fed
from coterie.methods.known_groups import known_groups, with_groups_read
from coterie.methods.meta import apfl, per_fedavg, pfedme
from coterie.methods.moon import moon
from coterie.methods.pacfl import pacfl
from coterie.methods.personal import ditto, fedper, fedrep, lg_fedavg
from coterie.methods.regrouped import adaptive, clusterfl, fl_hc, flis
from coterie.methods.serverside import fedadam, fedavgm, fedyogi, krum, median, trimmed_mean
from coterie.methods.user_centric import user_centric

__all__ = [
    "METHODS",
    "adaptive",
    "adaptive_tau",
    "apfl",
    "cfl",
    "clusterfl",
    "dc_pfl",
    "ditto",
    "excluded_by",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedclust",
    "feddyn",
    "fedfomo",
    "fednova",
    "fedper",
    "fedprox",
    "fedrep",
    "fedtsdp",
    "fedyogi",
    "find",
    "fl_hc",
    "flis",
    "group_evidence",
    "ifca",
    "is_known",
    "join",
    "k_fed",
    "known_groups",
    "krum",
    "lg_fedavg",
    "local",
    "make",
    "median",
    "moon",
    "oracle",
    "pacfl",
    "per_fedavg",
    "pfedme",
    "scaffold",
    "trimmed_mean",
    "user_centric",
]

METHODS: dict[str, Callable[..., Method]] = {
    "local": local,
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fednova": fednova,
    "scaffold": scaffold,
    "moon": moon,
    "feddyn": feddyn,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "krum": krum,
    "adaptive-tau": adaptive_tau,
    "fedper": fedper,
    "fedrep": fedrep,
    "lg-fedavg": lg_fedavg,
    "ditto": ditto,
    "pfedme": pfedme,
    "per-fedavg": per_fedavg,
    "apfl": apfl,
    "fedfomo": fedfomo,
    "ifca": ifca,
    "cfl": cfl,
    "fl-hc": fl_hc,
    "pacfl": pacfl,
    "clusterfl": clusterfl,
    "flis": flis,
    "adaptive": adaptive,
    "k-fed": k_fed,
    "oracle": oracle,
    "known-groups": known_groups,
    "group-evidence": group_evidence,
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


def excluded_by(name: str, parameter: str) -> set[str]:
    """The parameters of a method, or of a combination, that cannot be given beside this one.

    >>> excluded_by("fedclust", "threshold"), excluded_by("fedclust", "linkage")
    ({'clusters'}, set())
    """
    factories = [find(part) for part in name.split("+") if is_known(part)]
    declared = [names for factory in factories for names in exclusive_sets(factory)]
    return {other for names in declared if parameter in names for other in names} - {parameter}


def is_known(name: str) -> bool:
    """Whether there is a method of that name; no code is imported to find out."""
    return name in METHODS or name in entry_points(group="coterie.methods").names


def make(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    layer_interval: int = 1,
    layer_share: float | Literal["auto"] = "auto",
) -> Method:
    """A method from its name and parameters; quiet layers are averaged every so many rounds.

    Names joined by ``+`` make one method of several ones' pieces. A parameter goes to the part that
    has it; where two have it, it is written with its part.

    >>> make("fedprox", {"mu": 0.01}).name
    'fedprox'
    >>> make("ifca+fedper", {"ifca.k": 3, "fedper.k": 1}).name
    'ifca+fedper'
    """
    joined = "+" in name
    made = join(name, parameters or {}) if joined else find(name)(**(parameters or {}))
    return layer_wise(made, layer_interval, layer_share) if layer_interval > 1 else made


def join(name: str, parameters: Mapping[str, Any]) -> Method:
    """A method from the pieces of those named in ``name``, joined by ``+``."""
    parameters = with_groups_read(name, parameters)
    names = name.split("+")
    for part in names:
        if not part or names.count(part) > 1:
            raise ConfigError(f"method {name}: write each part once, as in ifca+ditto")
    given = shared_out(name, {part: find(part) for part in names}, parameters)
    made = combined(name, {part: find(part)(**given[part]) for part in names})
    return replace(made, source=Source(__name__, "join", {"name": name, "parameters": parameters}))


def shared_out(
    name: str, factories: Mapping[str, Callable[..., Method]], parameters: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Each part's own parameters: those written ``part.key``, and those that only it has."""
    found: dict[str, dict[str, Any]] = {part: {} for part in factories}
    known = {part: list(signature(f).parameters) for part, f in factories.items()}
    for key, value in parameters.items():
        part, dot, own = key.partition(".")
        if part in found and (dot or isinstance(value, Mapping)):
            found[part] |= {own: value} if dot else dict(value)
            continue
        owners = [p for p, keys in known.items() if key in keys]
        if not owners:
            every = [k for keys in known.values() for k in keys]
            raise ConfigError(unknown(f"parameter of {name}", key, every or ["(it takes none)"]))
        if len(owners) > 1:
            ways = " or ".join(f"{p}.{key}" for p in owners)
            raise ConfigError(f"method {name}: both parts have a parameter {key}: write {ways}")
        found[owners[0]][key] = value
    return found
