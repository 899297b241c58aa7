"""What to compare: methods × seeds × partitions × shifts × varied settings.

A sweep is a table ``[sweep]`` of a configuration, flags, or arguments; flags override the table.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from coterie.core.keys import keys
from coterie.errors import ConfigError, unknown
from coterie.experiment.presets import PRESETS
from coterie.experiment.spelling import SEPARATOR, apart, parameters_in, value_of
from coterie.experiment.user_code import admitted
from coterie.registry import METHODS
from coterie.results.titles import value_in_title

if TYPE_CHECKING:
    from coterie.data import Population

ALL = "all"
USUAL = "local,fedavg,fedprox,fedper,ifca:k=4,oracle"  # the default methods
_USUAL_GROUPS = 4  # for methods that need the number, if it is unknown
# Keys with their own word in a sweep.
_OWN = {
    "run.seed": "seeds",
    "partition.name": "partitions",
    "shift.name": "shifts",
    "method.name": "methods",
}
_NOT_VARIED = ("run.engine", "run.workers", "run.address", "run.device", "data.folder")

NamedMethod = tuple[str, str, dict[str, Any]]  # a title, a name, its parameters
Assignments = list[tuple[str, Any]]  # dotted keys and values, in order


@dataclass(frozen=True)
class Sweep:
    """A sweep. Fields are empty where the configuration's own value applies.

    ``methods`` are written as for ``--methods``; ``partitions`` and ``shifts`` in the same way, as
    in ``dirichlet:alpha=0.1``; ``vary`` has values by dotted key, and ``tune`` those of which each
    method gets its own; ``jobs`` is the number of runs at the same time.
    """

    methods: str = ""
    seeds: tuple[int, ...] = ()
    partitions: tuple[str, ...] = ()
    shifts: tuple[str, ...] = ()
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    jobs: int | None = None
    tune: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether there is one run for each method: only methods and their parameters vary."""
        others = [key for key in self.vary if not key.startswith("method.")]
        return not (self.seeds or self.partitions or self.shifts or others)

    def over(self, base: Sweep) -> Sweep:
        """This sweep over another one, which fills in what this one does not set."""
        set_here = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("vary", "tune") and getattr(self, f.name) not in (None, "", ())
        }
        vary, tune = {**base.vary, **self.vary}, {**base.tune, **self.tune}
        return replace(base, **set_here, vary=vary, tune=tune)

    def without(self, keys: Sequence[str]) -> Sweep:
        """The sweep without keys that have a single value."""
        emptied: dict[str, Any] = {
            word: () for key, word in _OWN.items() if key in keys and word != "methods"
        }
        emptied["vary"] = {k: v for k, v in self.vary.items() if k not in keys}
        emptied["tune"] = {k: v for k, v in self.tune.items() if k not in keys}
        return replace(self, **emptied)

    @property
    def keys(self) -> list[str]:
        """The keys of the configuration that the sweep varies."""
        keys = [key for key, word in _OWN.items() if word != "methods" and getattr(self, word)]
        return [*keys, *self.vary, *self.tune]


# --- reading a sweep -----------------------------------------------------------------------------


def of_table(table: Any) -> Sweep:
    """A sweep from the table ``[sweep]`` of a configuration, or from arguments.

    >>> of_table({"methods": ["local", "ifca:k=4"], "seeds": 3, "vary": {"train.lr": [0.1]}})
    Sweep(methods='local,ifca:k=4', seeds=(0, 1, 2), ..., vary={'train.lr': (0.1,)}, ...)
    >>> of_table({"sedes": 3})
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown key 'sweep.sedes'; did you mean 'sweep.seeds'? ...
    """
    if not isinstance(table, Mapping):
        raise ConfigError("'sweep' must be a table: write [sweep] and its keys below it")
    known = [f.name for f in fields(Sweep)]
    for key in table:
        if key not in known:
            raise ConfigError(unknown("key", f"sweep.{key}", [f"sweep.{k}" for k in known]))
    methods = table.get("methods") or ""
    return Sweep(
        methods=methods if isinstance(methods, str) else ",".join(_texts("methods", methods)),
        seeds=_seeds(table.get("seeds")),
        partitions=_texts("partitions", table.get("partitions") or ()),
        shifts=_texts("shifts", table.get("shifts") or ()),
        vary=_varied(table.get("vary") or {}),
        jobs=check_jobs(table.get("jobs")),
        tune=_tuned(table.get("tune") or {}),
    )


def of_flags(
    methods: str | None = None,
    seeds: str | None = None,
    partitions: str | None = None,
    shifts: str | None = None,
    vary: Sequence[str] | None = None,
    jobs: int | None = None,
    tune: Sequence[str] | None = None,
) -> Sweep:
    """A sweep from flags of the command line.

    >>> sweep = of_flags(seeds="0,7", partitions="iid,dirichlet:alpha=0.1", vary=["train.lr=0.1,1"])
    >>> sweep.seeds, sweep.partitions, sweep.vary
    ((0, 7), ('iid', 'dirichlet:alpha=0.1'), {'train.lr': (0.1, 1)})
    """
    numbers: int | list[int] | None = None
    if seeds is not None:
        seed_list = [value_of(s.strip()) for s in seeds.split(",") if s.strip()]
        numbers = seed_list[0] if len(seed_list) == 1 and "," not in seeds else seed_list
    return of_table(
        {
            "methods": methods,
            "seeds": numbers,
            "partitions": [] if partitions is None else SEPARATOR.split(partitions),
            "shifts": [] if shifts is None else SEPARATOR.split(shifts),
            "vary": _listed("--vary", "section.key", vary or ()),
            "jobs": jobs,
            "tune": _listed("--tune", "key", tune or ()),
        }
    )


def _listed(flag: str, key: str, texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values by key of flags such as ``--vary train.lr=0.05,0.1``."""
    listed: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or name.strip() in listed:
            reason = " once" if equals else ""
            raise ConfigError(
                f"{flag} {text}: write {key}=value,value{reason}, as in train.lr=0.05,0.1"
            )
        listed[name.strip()] = [value_of(v.strip()) for v in SEPARATOR.split(values)]
    return listed


def whole_key(name: str) -> str:
    """The dotted key of a training setting such as ``lr``; other names are left as they are.

    >>> whole_key("lr"), whole_key("method.mu")
    ('train.lr', 'method.mu')
    """
    return next((key.path for key in keys() if key.table == "train" and key.name == name), name)


def check_jobs(jobs: Any) -> int | None:
    """Check the number of runs at the same time; None is one for each core."""
    if jobs is None or (isinstance(jobs, int) and not isinstance(jobs, bool) and jobs > 0):
        return jobs
    raise ConfigError(f"jobs = {jobs!r}: give the number of runs at the same time, 1 or more")


def _seeds(seeds: Any) -> tuple[int, ...]:
    if seeds is None:
        return ()
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return tuple(range(seeds))
    numbers = list(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise ConfigError(
            f"seeds = {seeds!r}: give their number, as in 5 (seeds 0 to 4), or a list, as in 3,7 "
            "(in TOML [3, 7])"
        )
    _once("seeds", numbers)
    return tuple(numbers)


def _texts(key: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str):
        names = SEPARATOR.split(names)
    if not isinstance(names, Sequence) or not all(isinstance(text, str) for text in names):
        example = f'["{_EXAMPLE[key]}"]'
        raise ConfigError(f"sweep.{key} = {names!r}: give a list of names, as in {example}")
    stripped = tuple(text.strip() for text in names)
    _once(key, stripped)
    return stripped


_EXAMPLE = {
    "methods": "ifca:k=4",
    "partitions": "dirichlet:alpha=0.1",
    "shifts": "rotation:groups=4",
}


def _once(key: str, values: Sequence[Any]) -> None:
    repeated = [value for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise ConfigError(f"{key}: {repeated[0]} is given twice; once is enough")


def _varied(tree: Any, prefix: str = "", word: str = "vary") -> dict[str, tuple[Any, ...]]:
    """Values by dotted key; ``train.lr`` without quotes means nested tables in TOML."""
    varied: dict[str, tuple[Any, ...]] = {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f'sweep.{word} must be a table of lists, as in "train.lr" = [0.05, 0.1]')
    for name, values in tree.items():
        key = f"{prefix}{name}"
        if isinstance(values, Mapping):
            varied |= _varied(values, f"{key}.", word)
            continue
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigError(
                f"{word} {key} = {values!r}: give a list of values, as in train.lr = [0.05, 0.1]"
            )
        if key in _OWN:
            raise ConfigError(f"{word} {key}: use the sweep's key {_OWN[key]} instead")
        if key in _NOT_VARIED:
            raise ConfigError(f"{word} {key}: it does not change results; set it once")
        key = whole_key(key)
        if "." not in key:
            raise ConfigError(f"{word} {key}: write section.key, as in train.lr")
        _once(f"{word} {key}", [value_in_title(value) for value in values])
        varied[key] = tuple(values)
    return varied


def _tuned(tree: Any) -> dict[str, tuple[Any, ...]]:
    """The values of training settings to choose from."""
    tuned = _varied(tree, word="tune")
    for key, values in tuned.items():
        if key.split(".")[0] != "train":
            raise ConfigError(
                f"tune {key}: only training settings such as lr are tuned, so that every method "
                f"has the same budget; compare other settings with vary ({key})"
            )
        if len(values) < 2:
            raise ConfigError(f"tune {key}: give two values or more, as in lr=0.01,0.05,0.1")
    return tuned


_NAMED = {"--methods": "method", "partitions": "partition", "shifts": "shift"}


def method_list(text: str, where: str = "--methods") -> list[NamedMethod]:
    """Titles, names and parameters from ``local,ifca:k=4``.

    >>> method_list("local,ifca:k=4")
    [('local', 'local', {}), ('ifca k=4', 'ifca', {'k': 4})]
    """
    methods: list[NamedMethod] = []
    for item in SEPARATOR.split(text):
        name, *settings = apart(item.strip())
        if not name:
            raise ConfigError(f"{where} {text}: a name is empty; is there a comma too many?")
        parameters = parameters_in(settings, item, where)
        title = " ".join([name, *settings])
        if where in _NAMED:
            name = admitted({_NAMED[where]: {"name": name}})[_NAMED[where]]["name"]
        if title in [t for t, _, _ in methods]:
            raise ConfigError(f"{where} names '{item.strip()}' twice: once is enough")
        methods.append((title, name, parameters))
    return methods


# --- the methods and settings of a sweep ----------------------------------------------------------


def methods_of(sweep: Sweep, named: Sequence[NamedMethod] = ()) -> list[NamedMethod]:
    """The methods of a sweep, or these, each repeated for the varied values of its parameters.

    A method without such a parameter, or that sets it already, appears once.

    >>> methods_of(Sweep("local,fedprox", vary={"method.mu": (0.1, 1)}))
    [('local', 'local', {}), ('fedprox mu=0.1', 'fedprox', {'mu': 0.1}), ('fedprox mu=1', ...)]
    """
    methods = list(named) or method_list(sweep.methods or USUAL)
    for key, values in sweep.vary.items():
        if not key.startswith("method."):
            continue
        leaf = key.removeprefix("method.")
        takers = [n for _, n, own in methods if n != ALL and leaf not in own and _takes(n, leaf)]
        if not takers:
            raise ConfigError(
                f"vary {key}: none of the methods has a parameter {leaf}"
                + (" that it does not set already" if any(leaf in g for _, _, g in methods) else "")
            )
        expanded: list[NamedMethod] = []
        for title, name, own in methods:
            if name not in takers or leaf in own:
                expanded.append((title, name, own))
            else:
                expanded += [
                    (f"{title} {leaf}={value_in_title(v)}", name, {**own, leaf: v}) for v in values
                ]
        methods = expanded
    titles = [title for title, _, _ in methods]
    _once("methods", titles)
    return methods


def _takes(name: str, key: str) -> bool:
    if key in ("layer_interval", "layer_share"):
        return name != "local"  # it sends no layers
    if name in PRESETS:
        return key in PRESETS[name].parameters
    from coterie.methods import find, parts_of

    parts = parts_of(name)
    part, dot, parameter = key.partition(".")
    if dot:
        return part in parts and parameter in inspect.signature(find(part)).parameters
    return any(key in inspect.signature(find(p)).parameters for p in parts)


def settings_of_sweep(sweep: Sweep) -> Iterator[tuple[dict[str, Any], Assignments]]:
    """Every combination of partitions, shifts and varied keys: its labels and its assignments.

    >>> list(settings_of_sweep(Sweep(partitions=("iid",), vary={"train.lr": (0.1,)})))
    [({'partition': 'iid', 'train.lr': 0.1}, [('partition.name', 'iid'), ('train.lr', 0.1)])]
    """
    axes: list[list[tuple[str, Any, Assignments]]] = []
    for table, texts in (("partition", sweep.partitions), ("shift", sweep.shifts)):
        if texts:
            named = [method_list(text, f"{table}s")[0] for text in texts]
            for title, _, own in named:
                for key in [k for k in own if f"{table}.{k}" in sweep.vary]:
                    raise ConfigError(
                        f"vary {table}.{key}: {title} of {table}s sets {key} already; leave out "
                        "one of the two"
                    )
            axes.append(
                [
                    (
                        table,
                        title,
                        [(f"{table}.name", name), *((f"{table}.{k}", v) for k, v in own.items())],
                    )
                    for title, name, own in named
                ]
            )
    for key, values in sweep.vary.items():
        if not key.startswith("method."):
            axes.append([(key, value, [(key, value)]) for value in values])
    for chosen in itertools.product(*axes):
        yield (
            {label: value for label, value, _ in chosen},
            [assignment for _, _, own in chosen for assignment in own],
        )


def every_method(population: Population, holdout: int = 0) -> list[NamedMethod]:
    """All methods with their defaults; one that needs ``k`` gets the number of true groups.

    If that is unknown it gets four, or the number of training clients if that is smaller.
    ``group-evidence`` is left out: it trains no model to compare.
    """
    from coterie.methods.group_evidence import NAME as GROUP_EVIDENCE

    true_groups, members = population.groups, len(population.clients) - holdout
    k = min(_USUAL_GROUPS if true_groups is None else len(set(true_groups)), members)
    methods: list[NamedMethod] = []
    for name, factory in METHODS.items():
        if name == GROUP_EVIDENCE:
            continue
        parameters = inspect.signature(factory).parameters
        needs_k = "k" in parameters and parameters["k"].default is inspect.Parameter.empty
        methods.append((f"{name} k={k}", name, {"k": k}) if needs_k else (name, name, {}))
    return methods
