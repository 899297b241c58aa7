"""What server and clients agree on before training: the form of the data, and the experiment.

A client describes its data by a few numbers and class names; no samples leave the client. The
server finds what the clients' data have in common and sends all clients the terms of the
experiment: names and numbers, from which each builds the model and the method with the code that is
installed on its own machine.
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

_CLIENTS, _SAMPLES = 10**6, 2**31  # upper limits
_PATHS = (("data", "folder"), ("model", "start"), ("availability", "file"))


@dataclass(frozen=True)
class Described:
    """A description of a client's data, without any of its samples."""

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
    def of(population: Population, index: int) -> Described:
        """Describe the client at this index of a population."""
        data = population.clients[index]
        return Described(
            population.kind,
            population.shape,
            str(data.train.x.dtype).removeprefix("torch."),
            str(data.train.y.dtype).removeprefix("torch."),
            tuple(data.train.y.shape[1:]),
            population.classes,
            population.targets,
            len(population.vocabulary or ()),
            (len(data.train), len(data.val), len(data.test)),
            None if population.groups is None else population.groups[index],
            data.name,
        )

    def to_json(self) -> dict[str, Any]:
        """Convert the description to plain values."""
        return asdict(self)

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Described:
        """Read a description from plain values; DataError if one is missing or invalid."""
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
            raise DataError(f"its description of its data is invalid: {error!r}") from None


def _bounded(tree: Mapping[str, Any]) -> None:
    """Refuse sizes that no model could be made for, since another machine chose them."""
    for key, largest in (("shape", 2**26), ("width", 2**16)):
        parts = [int(n) for n in tree[key]]
        if len(parts) > 8 or any(n < 1 for n in parts) or math.prod(parts) > largest:
            raise ValueError(key)
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
    """Say how the form of a client's data differs from another's; empty if it does not."""
    for key in ("kind", "shape", "samples", "labels", "width"):
        if getattr(own, key) != getattr(other, key):
            return f"its data is of {key} {getattr(own, key)}, not {getattr(other, key)}"
    if (own.classes is None) != (other.classes is None):
        return "it predicts numbers where the other clients predict classes, or the reverse"
    if own.classes is None and own.targets != other.targets:
        return f"it predicts {own.targets} numbers, not {other.targets}"
    return ""


def in_common(
    described: Mapping[ClientId, Described],
) -> tuple[Described, dict[ClientId, str]]:
    """Find the form that most clients' data have, with the classes of all of them.

    Also returns the clients whose data do not fit, with the reasons.
    """
    typical = max(
        described.values(),
        key=lambda data: sum(not unlike(data, other) for other in described.values()),
    )
    misfits = {c: why for c, data in described.items() if (why := unlike(data, typical))}
    fitting = [data for c, data in described.items() if c not in misfits]
    vocabulary = max(data.vocabulary for data in fitting)
    if typical.classes is None:
        return replace(typical, vocabulary=vocabulary), misfits
    classes = typical.classes
    if any(data.classes != classes for data in fitting):
        names = {name for data in fitting for name in data.classes or ()}
        numbers = all(name.removeprefix("-").isdecimal() for name in names)
        words = sorted(names)  # first by spelling, since two may be one number: 7 and 07
        classes = tuple(sorted(words, key=int) if numbers else words)
    common = replace(typical, classes=classes, targets=len(classes), vocabulary=vocabulary)
    return common, misfits


def shell(like: Described, sizes: Sequence[int], name: str = "") -> ClientData:
    """Placeholder data for a client of which only the numbers of samples are known."""

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
    """The population as the server knows it; clients that are not there yet have no samples.

    ``names`` are the names in the server's keys, which take precedence over the clients' own.
    """
    key_names = dict(names or {})
    clients = tuple(
        shell(like, described[i].sizes, key_names.get(i, described[i].name))
        if i in described
        else shell(like, (0, 0, 0), key_names.get(i, ""))
        for i in range(count)
    )
    groups = tuple(described[i].groups if i in described else None for i in range(count))
    true_groups = None if None in groups else groups
    return _population(like, clients, true_groups)  # type: ignore[arg-type]


def seen_from_client(
    like: Described, own: Population, index: int, id: ClientId, count: int, least: int
) -> Population:
    """The population as one client knows it: its own data, with the federation's class numbers.

    The client is the one at index ``index`` of ``own``. Of the others it only knows that there are
    ``count`` clients in all, with at least ``least`` samples each.
    """
    if not id < count <= _CLIENTS or not 0 <= least <= _SAMPLES:
        raise WireError(
            f"the server's terms are for {count} clients with at least {least} samples each, which "
            f"is impossible: this is client {id}, and there can be at most {_CLIENTS}"
        )
    data = own.clients[index]
    if own.classes is not None and own.classes != like.classes:
        assert like.classes is not None
        unknown = set(own.classes) - set(like.classes)
        if unknown:
            raise DataError(
                f"this client has classes that the federation does not know: {sorted(unknown)}. It "
                f"knows {list(like.classes)}"
            )
        numbers = torch.tensor([like.classes.index(name) for name in own.classes])

        def renumbered(split: Split) -> Split:
            return Split(split.x, numbers[split.y])

        data = ClientData(
            renumbered(data.train), renumbered(data.val), renumbered(data.test), data.name
        )
    other = shell(like, (least, 0, 0))
    clients = tuple(data if i == id else other for i in range(count))
    return _population(like, clients, None)


def _population(
    like: Described, clients: tuple[ClientData, ...], groups: tuple[int, ...] | None
) -> Population:
    words = tuple(str(i) for i in range(like.vocabulary)) if like.vocabulary else None
    return Population(
        clients, like.kind, like.shape, like.classes, like.targets, groups, None, words
    )


def travelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration to send to clients, without paths and settings that concern the server."""
    tree = {table: dict(keys) for table, keys in config.items() if isinstance(keys, Mapping)}
    for table, key in _PATHS:
        tree.get(table, {}).pop(key, None)
    if isinstance(tree.get("data", {}).get("metadata"), str):
        del tree["data"]["metadata"]
    if "method" in tree:  # clients must not learn the groups of the others
        name = str(tree["method"].get("name", ""))
        tree["method"] = with_groups(name, tree["method"], lambda _: COLUMN)
    for table in ("availability", "clock", "stop"):
        tree.pop(table, None)
    for key in ("device", "engine", "workers", "address", "cpus_per_worker", "gpus_per_worker"):
        tree.get("run", {}).pop(key, None)
    return tree


def agreement_digest(run: str, terms: Mapping[str, Any]) -> str:
    """A digest of a run and its terms, except the number of clients, which may grow."""
    return _digest([__version__, run, _lasting(terms)])


def terms_digest(terms: Mapping[str, Any]) -> str:
    """A digest of the same terms that depends neither on the run nor on Coterie's version."""
    return _digest(_lasting(terms))


def _lasting(terms: Mapping[str, Any]) -> dict[str, Any]:
    return {key: terms[key] for key in ("config", "like", "least", "start", "code") if key in terms}


def _digest(tree: Any) -> str:
    plain = json.loads(json.dumps(tree))  # as a client receives it, with keys as strings
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def digest_of_start(start: Weights) -> str:
    """A digest of the initial weights."""
    return hashlib.sha256(start.vector.numpy().tobytes()).hexdigest()
