"""What server and clients agree on before they train: whose data is like whose, and the experiment.

A client describes its data in a few numbers and class names; none of its samples leave. The server
finds what all of them have in common, and tells everybody the experiment: names and numbers, from
which each builds model and method out of what is installed on its own machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from coterie import __version__
from coterie.core.messages import ClientId
from coterie.core.weights import Weights
from coterie.data.population import ClientData, Population, Split
from coterie.errors import DataError, WireError
from coterie.methods.known_groups import COLUMN, with_groups

_CLIENTS, _SAMPLES = 10**6, 2**31  # more than there can be
_PATHS = (("data", "folder"), ("model", "start"), ("availability", "file"))


@dataclass(frozen=True)
class Described:
    """A client's data from outside."""

    kind: str
    shape: tuple[int, ...]
    samples: str  # the type of their numbers
    labels: str
    width: tuple[int, ...]  # of a regression target
    classes: tuple[str, ...] | None
    targets: int
    vocabulary: int
    sizes: tuple[int, int, int]
    groups: int | None = None  # the true group, where a scenario knows it
    name: str = ""

    @staticmethod
    def of(population: Population, place: int) -> Described:
        """One client of a population."""
        own = population.clients[place]
        return Described(
            population.kind,
            population.shape,
            str(own.train.x.dtype).removeprefix("torch."),
            str(own.train.y.dtype).removeprefix("torch."),
            tuple(own.train.y.shape[1:]),
            population.classes,
            population.targets,
            len(population.vocabulary or ()),
            (len(own.train), len(own.val), len(own.test)),
            None if population.groups is None else population.groups[place],
            own.name,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Described:
        """From plain values, with every one of the right type; DataError if not."""
        try:
            classes = tree["classes"]
            sizes = tuple(int(n) for n in tree["sizes"])
            if len(sizes) != 3 or min(sizes) < 0 or sizes[0] < 1 or max(sizes) > _SAMPLES:
                raise ValueError("sizes")
            _bounded(tree)
            group = tree["groups"]
            return Described(
                str(tree["kind"]),
                tuple(int(n) for n in tree["shape"]),
                _type(tree["samples"]),
                _type(tree["labels"]),
                tuple(int(n) for n in tree["width"]),
                None if classes is None else tuple(str(c)[:200] for c in classes),
                int(tree["targets"]),
                int(tree["vocabulary"]),
                sizes,
                None if group is None else int(group),
                str(tree["name"])[:200],
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"a description of data that makes no sense: {error!r}") from None


def _bounded(tree: Mapping[str, Any]) -> None:
    """Refuse what no model could be made for: it is described by a machine of others."""
    for what, most in (("shape", 2**26), ("width", 2**16)):
        parts = [int(n) for n in tree[what]]
        if len(parts) > 8 or any(n < 1 for n in parts) or math.prod(parts) > most:
            raise ValueError(what)
    classes = tree["classes"]
    if classes is not None and not 1 <= len(classes) <= 10_000:
        raise ValueError("classes")
    if not 1 <= int(tree["targets"]) <= 10_000 or not 0 <= int(tree["vocabulary"]) <= 10**7:
        raise ValueError("targets")


def _type(name: Any) -> str:
    if name not in ("uint8", "float32", "int64"):
        raise ValueError(f"type {name!r}")
    return str(name)


def unlike(own: Described, other: Described) -> str:
    """In what two clients' data are of different kinds; empty if in nothing."""
    for what in ("kind", "shape", "samples", "labels", "width"):
        if getattr(own, what) != getattr(other, what):
            return f"its data is of {what} {getattr(own, what)}, not {getattr(other, what)}"
    if (own.classes is None) != (other.classes is None):
        return "it has numbers to predict where the others have classes, or the other way round"
    if own.classes is None and own.targets != other.targets:
        return f"it has {own.targets} numbers to predict, not {other.targets}"
    return ""


def in_common(
    described: Mapping[ClientId, Described],
) -> tuple[Described, dict[ClientId, str]]:
    """What most have in common, with the classes of them all; and who does not fit, and why."""
    model = max(
        described.values(),
        key=lambda own: sum(not unlike(own, other) for other in described.values()),
    )
    odd = {c: why for c, own in described.items() if (why := unlike(own, model))}
    fitting = [own for c, own in described.items() if c not in odd]
    vocabulary = max(own.vocabulary for own in fitting)
    if model.classes is None:
        return replace(model, vocabulary=vocabulary), odd
    classes = model.classes
    if any(own.classes != classes for own in fitting):
        names = {name for own in fitting for name in own.classes or ()}
        numbers = all(name.removeprefix("-").isdecimal() for name in names)
        words = sorted(names)  # two may be one number: 7 and 07
        classes = tuple(sorted(words, key=int) if numbers else words)
    return replace(model, classes=classes, targets=len(classes), vocabulary=vocabulary), odd


def shell(like: Described, sizes: Sequence[int], name: str = "") -> ClientData:
    """A client of which nothing is known but how many samples it has."""

    def part(count: int) -> Split:
        x = torch.zeros(1, dtype=getattr(torch, like.samples))
        y = torch.zeros(1, dtype=getattr(torch, like.labels))
        return Split(
            x.reshape([1] * (1 + len(like.shape))).expand(count, *like.shape),
            y.reshape([1] * (1 + len(like.width))).expand(count, *like.width),
        )

    return ClientData(part(sizes[0]), part(sizes[1]), part(sizes[2]), name)


def seen_from_server(
    like: Described,
    described: Mapping[ClientId, Described],
    count: int,
    names: Mapping[ClientId, str] | None = None,
) -> Population:
    """The clients as the server knows them; those not there yet have no samples.

    ``names`` are those that the server's keys say, whatever a client calls itself.
    """
    known = dict(names or {})
    clients = tuple(
        shell(like, described[i].sizes, known.get(i, described[i].name))
        if i in described
        else shell(like, (0, 0, 0), known.get(i, ""))
        for i in range(count)
    )
    groups = tuple(described[i].groups if i in described else None for i in range(count))
    true = None if None in groups else groups
    return _population(like, clients, true)  # type: ignore[arg-type]


def seen_from_client(
    like: Described, own: Population, place: int, id: ClientId, count: int, least: int
) -> Population:
    """The same clients as one of them knows them: itself, its labels numbered as everybody's."""
    if not id < count <= _CLIENTS or not 0 <= least <= _SAMPLES:
        raise WireError(
            f"the server says that there are {count} clients, of {least} samples at least: client "
            f"{id} is one of at most {_CLIENTS}"
        )
    mine = own.clients[place]
    if own.classes is not None and own.classes != like.classes:
        assert like.classes is not None
        unknown = set(own.classes) - set(like.classes)
        if unknown:
            raise DataError(
                f"this client has classes that the federation does not know: {sorted(unknown)}. It "
                f"knows {list(like.classes)}"
            )
        places = torch.tensor([like.classes.index(name) for name in own.classes])

        def renumbered(split: Split) -> Split:
            return Split(split.x, places[split.y])

        mine = ClientData(
            renumbered(mine.train), renumbered(mine.val), renumbered(mine.test), mine.name
        )
    other = shell(like, (least, 0, 0))
    clients = tuple(mine if i == id else other for i in range(count))
    return _population(like, clients, None)


def _population(
    like: Described, clients: tuple[ClientData, ...], groups: tuple[int, ...] | None
) -> Population:
    words = tuple(str(i) for i in range(like.vocabulary)) if like.vocabulary else None
    return Population(
        clients, like.kind, like.shape, like.classes, like.targets, groups, None, words
    )


def travelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment's configuration without the server's own paths, and what is the server's."""
    tree = {table: dict(keys) for table, keys in config.items() if isinstance(keys, Mapping)}
    for table, key in _PATHS:
        tree.get(table, {}).pop(key, None)
    if isinstance(tree.get("data", {}).get("metadata"), str):
        del tree["data"]["metadata"]
    if "method" in tree:  # who is in which group is the server's to know
        name = str(tree["method"].get("name", ""))
        tree["method"] = with_groups(name, tree["method"], lambda _: COLUMN)
    for table in ("availability", "clock", "stop"):
        tree.pop(table, None)
    for key in ("device", "engine", "workers", "address", "cpus_per_worker", "gpus_per_worker"):
        tree.get("run", {}).pop(key, None)
    return tree


def agreement_of(run: str, terms: Mapping[str, Any]) -> str:
    """A name for a run and all that a client is told of it, but for who else may come."""
    return _digest([__version__, run, _lasting(terms)])


def terms_of(terms: Mapping[str, Any]) -> str:
    """A name for the same without the run, whichever version of Coterie goes on with it."""
    return _digest(_lasting(terms))


def _lasting(terms: Mapping[str, Any]) -> dict[str, Any]:
    return {key: terms[key] for key in ("config", "like", "least", "start", "code") if key in terms}


def _digest(tree: Any) -> str:
    plain = json.loads(json.dumps(tree))  # as it arrives: keys are texts
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def digest_of_start(start: Weights) -> str:
    """A name for the weights that everybody starts from."""
    return hashlib.sha256(start.vector.numpy().tobytes()).hexdigest()
