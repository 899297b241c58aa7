"""What a comparison is asked for: methods × seeds × partitions × shifts × varied settings.

It is written as a table ``[sweep]`` of a configuration, as flags, or as arguments; flags win.
"""

from __future__ import annotations

import inspect
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, unknown
from coterie.experiment.presets import PRESETS
from coterie.experiment.user_code import admitted
from coterie.registry import METHODS, PARTITIONS, SHIFTS, is_place
from coterie.results.titles import shown

if TYPE_CHECKING:
    from coterie.data import Population

ALL = "all"
USUAL = "local,fedavg,fedprox,fedper,ifca:k=4,oracle"  # if nobody says which methods
_USUAL_GROUPS = 4  # what a method gets that must be told how many there are, and nobody knows
# Keys that have a word of their own in a sweep.
_OWN = {
    "run.seed": "seeds",
    "partition.name": "partitions",
    "shift.name": "shifts",
    "method.name": "methods",
}
_NOT_VARIED = ("run.engine", "run.workers", "run.address", "run.device", "data.folder")
_SEPARATOR = re.compile(r",(?![^\[]*\])")  # a comma inside [1, 2] does not separate

Asked = tuple[str, str, dict[str, Any]]  # a title, a name, its parameters
Assignments = list[tuple[str, Any]]  # dotted keys and values, in order


@dataclass(frozen=True)
class Sweep:
    """What is asked for. ``seeds`` and the rest are empty where the configuration's own count.

    ``methods`` are written as for ``--methods``; ``partitions`` and ``shifts`` in the same way, as
    in ``dirichlet:alpha=0.1``; ``vary`` has values by dotted key; ``jobs`` is how many runs are at
    work at a time.
    """

    methods: str = ""
    seeds: tuple[int, ...] = ()
    partitions: tuple[str, ...] = ()
    shifts: tuple[str, ...] = ()
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    jobs: int | None = None

    @property
    def plain(self) -> bool:
        """Whether it is one run a method: nothing but methods, and parameters of theirs."""
        others = [key for key in self.vary if not key.startswith("method.")]
        return not (self.seeds or self.partitions or self.shifts or others)

    def over(self, below: Sweep) -> Sweep:
        """This, and what it does not say from below; single keys are varied by both."""
        said = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "vary" and getattr(self, f.name) not in (None, "", ())
        }
        return replace(below, **said, vary={**below.vary, **self.vary})

    def without(self, keys: Sequence[str]) -> Sweep:
        """The same where these keys are given, and so not swept over."""
        left: dict[str, Any] = {
            word: () for key, word in _OWN.items() if key in keys and word != "methods"
        }
        return replace(self, **left, vary={k: v for k, v in self.vary.items() if k not in keys})

    @property
    def keys(self) -> list[str]:
        """The keys of the configuration that it sweeps over."""
        own = [key for key, word in _OWN.items() if word != "methods" and getattr(self, word)]
        return [*own, *self.vary]


# --- how it is written ---------------------------------------------------------------------------


def of_table(table: Any) -> Sweep:
    """From ``[sweep]`` of a configuration, or the arguments of a call.

    >>> of_table({"methods": ["local", "ifca:k=4"], "seeds": 3, "vary": {"train.lr": [0.1]}})
    Sweep(methods='local,ifca:k=4', seeds=(0, 1, 2), ..., vary={'train.lr': (0.1,)}, jobs=None)
    >>> of_table({"sedes": 3})
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown key 'sweep.sedes'; did you mean 'sweep.seeds'? ...
    """
    if not isinstance(table, Mapping):
        raise ConfigError("'sweep' must be a table: write [sweep], and its keys below")
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
    )


def of_flags(
    methods: str | None = None,
    seeds: str | None = None,
    partitions: str | None = None,
    shifts: str | None = None,
    vary: Sequence[str] | None = None,
    jobs: int | None = None,
) -> Sweep:
    """From the command line.

    >>> found = of_flags(seeds="0,7", partitions="iid,dirichlet:alpha=0.1", vary=["train.lr=0.1,1"])
    >>> found.seeds, found.partitions, found.vary
    ((0, 7), ('iid', 'dirichlet:alpha=0.1'), {'train.lr': (0.1, 1)})
    """
    varied: dict[str, list[Any]] = {}
    for text in vary or ():
        key, equals, values = text.partition("=")
        if not equals or key.strip() in varied:
            twice = " once" if equals else ""
            raise ConfigError(
                f"--vary {text}: write section.key=value,value{twice}, as in train.lr=0.05,0.1"
            )
        varied[key.strip()] = [value_of(v.strip()) for v in _SEPARATOR.split(values)]
    numbers: int | list[int] | None = None
    if seeds is not None:
        found = [value_of(s.strip()) for s in seeds.split(",") if s.strip()]
        numbers = found[0] if len(found) == 1 and "," not in seeds else found
    return of_table(
        {
            "methods": methods,
            "seeds": numbers,
            "partitions": [] if partitions is None else _SEPARATOR.split(partitions),
            "shifts": [] if shifts is None else _SEPARATOR.split(shifts),
            "vary": varied,
            "jobs": jobs,
        }
    )


def check_jobs(jobs: Any) -> int | None:
    """A number of runs at a time, or None for as many as there are cores."""
    if jobs is None or (isinstance(jobs, int) and not isinstance(jobs, bool) and jobs > 0):
        return jobs
    raise ConfigError(f"jobs = {jobs!r}: give how many runs are to be at work at a time, 1 or more")


def _seeds(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return tuple(range(given))
    numbers = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise ConfigError(
            f"seeds = {given!r}: give how many, as in 5 (seeds 0 to 4), or which, as in 3,7 "
            "(in TOML [3, 7])"
        )
    _once("seeds", numbers)
    return tuple(numbers)


def _texts(key: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        given = _SEPARATOR.split(given)
    if not isinstance(given, Sequence) or not all(isinstance(text, str) for text in given):
        example = f'["{_EXAMPLE[key]}"]'
        raise ConfigError(f"sweep.{key} = {given!r}: give a list of names, as in {example}")
    found = tuple(text.strip() for text in given)
    _once(key, found)
    return found


_EXAMPLE = {
    "methods": "ifca:k=4",
    "partitions": "dirichlet:alpha=0.1",
    "shifts": "rotation:groups=4",
}


def _once(key: str, values: Sequence[Any]) -> None:
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice:
        raise ConfigError(f"{key}: {twice[0]} is there twice; once is enough")


def _varied(tree: Any, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Values by dotted key; ``train.lr`` without quotes is nested tables in TOML."""
    found: dict[str, tuple[Any, ...]] = {}
    if not isinstance(tree, Mapping):
        raise ConfigError('sweep.vary must be a table of lists, as in "train.lr" = [0.05, 0.1]')
    for name, values in tree.items():
        key = f"{prefix}{name}"
        if isinstance(values, Mapping):
            found |= _varied(values, f"{key}.")
            continue
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigError(
                f"vary {key} = {values!r}: give a list of values, as in train.lr = [0.05, 0.1]"
            )
        if key in _OWN:
            raise ConfigError(f"vary {key}: a sweep has a word for it, {_OWN[key]}")
        if key in _NOT_VARIED:
            raise ConfigError(f"vary {key}: it leaves results as they are, so set it once")
        if "." not in key:
            raise ConfigError(f"vary {key}: write section.key, as in train.lr")
        _once(f"vary {key}", [shown(value) for value in values])
        found[key] = tuple(values)
    return found


def value_of(text: str) -> Any:
    """A value written as in TOML, or a bare word.

    >>> value_of("0.1"), value_of("[1, 2]"), value_of("rotation")
    (0.1, [1, 2], 'rotation')
    """
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


_NAMED = {"--methods": "method", "partitions": "partition", "shifts": "shift"}


def _apart(item: str) -> list[str]:
    """A name and its settings; the name may be a place, ``mine.py:function``, or have one in it.

    >>> _apart("ifca:k=4"), _apart("mine.py:my_method+ditto:k=4:lam=1")
    (['ifca', 'k=4'], ['mine.py:my_method+ditto', 'k=4', 'lam=1'])
    """
    parts = item.split(":")
    settings = list(itertools.takewhile(lambda part: "=" in part, reversed(parts)))[::-1]
    rest = parts[: len(parts) - len(settings)]
    name = ":".join(rest)
    known = any(registry.knows(parts[0]) for registry in (METHODS, PARTITIONS, SHIFTS))
    if len(rest) > 1 and (known or not any(is_place(part) for part in name.split("+"))):
        return parts
    return [name, *settings]


def method_list(text: str, where: str = "--methods") -> list[Asked]:
    """Titles, names and parameters from ``local,ifca:k=4``.

    >>> method_list("local,ifca:k=4")
    [('local', 'local', {}), ('ifca k=4', 'ifca', {'k': 4})]
    """
    found: list[Asked] = []
    for item in _SEPARATOR.split(text):
        name, *settings = _apart(item.strip())
        if not name:
            raise ConfigError(f"{where} {text}: there is an empty name; is a comma too many there?")
        parameters = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(f"{where} {item}: write name:parameter=value, as in ifca:k=4")
            parameters[key] = value_of(value)
        title = " ".join([name, *settings])
        if where in _NAMED:
            name = admitted({_NAMED[where]: {"name": name}})[_NAMED[where]]["name"]
        if title in [t for t, _, _ in found]:
            raise ConfigError(f"{where} names '{item.strip()}' twice: once is enough")
        found.append((title, name, parameters))
    return found


# --- what it comes to ----------------------------------------------------------------------------


def methods_of(sweep: Sweep) -> list[Asked]:
    """The methods, each with the values of its own parameters that are varied.

    A method that lacks such a parameter, or says it itself, is there once.

    >>> methods_of(Sweep("local,fedprox", vary={"method.mu": (0.1, 1)}))
    [('local', 'local', {}), ('fedprox mu=0.1', 'fedprox', {'mu': 0.1}), ('fedprox mu=1', ...)]
    """
    asked = method_list(sweep.methods or USUAL)
    for key, values in sweep.vary.items():
        if not key.startswith("method."):
            continue
        own = key.removeprefix("method.")
        taking = [n for _, n, given in asked if n != ALL and own not in given and _takes(n, own)]
        if not taking:
            raise ConfigError(
                f"vary {key}: none of the methods takes a parameter {own}"
                + (" that it does not say itself" if any(own in g for _, _, g in asked) else "")
            )
        more: list[Asked] = []
        for title, name, given in asked:
            if name not in taking or own in given:
                more.append((title, name, given))
            else:
                more += [(f"{title} {own}={shown(v)}", name, {**given, own: v}) for v in values]
        asked = more
    titles = [title for title, _, _ in asked]
    _once("methods", titles)
    return asked


def _takes(name: str, key: str) -> bool:
    if key in ("layer_interval", "layer_share"):
        return name != "local"  # nothing travels, so it has no pace
    if name in PRESETS:
        return key in PRESETS[name].parameters
    from coterie.methods import find, parts_of

    parts = parts_of(name)
    part, dot, own = key.partition(".")
    if dot:
        return part in parts and own in inspect.signature(find(part)).parameters
    return any(key in inspect.signature(find(p)).parameters for p in parts)


def settings_of(sweep: Sweep) -> Iterator[tuple[dict[str, Any], Assignments]]:
    """Every combination of partitions, shifts and varied keys: what it is called, what it sets.

    >>> list(settings_of(Sweep(partitions=("iid",), vary={"train.lr": (0.1,)})))
    [({'partition': 'iid', 'train.lr': 0.1}, [('partition.name', 'iid'), ('train.lr', 0.1)])]
    """
    axes: list[list[tuple[str, Any, Assignments]]] = []
    for table, texts in (("partition", sweep.partitions), ("shift", sweep.shifts)):
        if texts:
            asked = [method_list(text, f"{table}s")[0] for text in texts]
            for title, _, own in asked:
                for key in [k for k in own if f"{table}.{k}" in sweep.vary]:
                    raise ConfigError(
                        f"vary {table}.{key}: {title} of {table}s says {key} itself; leave one of "
                        "the two out"
                    )
            axes.append(
                [
                    (
                        table,
                        title,
                        [(f"{table}.name", name), *((f"{table}.{k}", v) for k, v in own.items())],
                    )
                    for title, name, own in asked
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


def every_method(population: Population, holdout: int = 0) -> list[Asked]:
    """All methods with their defaults; one that needs ``k`` gets the number of true groups.

    Where nobody knows that it gets four, or as many as there are clients that train. What only
    asks about groups trains no model to compare.
    """
    from coterie.methods.group_evidence import NAME as GROUP_EVIDENCE

    known, members = population.groups, len(population.clients) - holdout
    k = min(_USUAL_GROUPS if known is None else len(set(known)), members)
    found: list[Asked] = []
    for name, factory in METHODS.items():
        if name == GROUP_EVIDENCE:
            continue
        parameters = inspect.signature(factory).parameters
        needs_k = "k" in parameters and parameters["k"].default is inspect.Parameter.empty
        found.append((f"{name} k={k}", name, {"k": k}) if needs_k else (name, name, {}))
    return found
