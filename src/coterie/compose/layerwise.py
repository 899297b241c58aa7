"""Layer-wise aggregation: layers in which a group's clients hardly differ are averaged less often.

A piece that any averaging method can use: it wraps the method's federation on the server and its
tasks on the client, and the method itself does not notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from coterie.client import Client, Task
from coterie.clustering import min_max
from coterie.core.federation import Federation
from coterie.core.messages import (
    Array,
    Chosen,
    ClientId,
    Mean,
    Mixing,
    Order,
    Reply,
    Scalar,
    Slot,
    Upload,
)
from coterie.core.method import Method, Round, Source, State
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError

KEY = "layer-wise"  # its place in the server's memory, in a client's state and among metrics
ROUND = f"{KEY}.round"  # of a client's last upload
SLOT = f"{KEY}.slot"  # whose mean a client's last upload went into, where its task says so
RESTS = "lets layers rest already"  # why it cannot be had twice
_ROUNDING = 1e-9  # where clients differ alike in all layers, none is quieter than the others
AT_REST = (
    "in the last round layers were at rest, and clients were scored with their own: to compare "
    "with methods that average all layers, take a round in which all were due (notes.layers)"
)
WHOLE = "whole"  # an order with this in its config is answered with all layers


def layer_wise(
    inner: Method, alpha: int = 3, share: float | Literal["auto"] = "auto", start: int = 5
) -> Method:
    """The same method, its quiet layers averaged every ``alpha`` rounds only.

    Rule: a client compares the model it sent with the mean it then receives, layer by layer:
    D_l = ‖S(w_l,i) − S(w_l,g)‖₁/dim, S scaling a layer to [0, 1]. After the first ``start`` rounds
    a quiet layer is due every ``alpha`` rounds, the others every round. With ``share`` "auto" all
    layers are quiet but one, in which D_l, averaged over the group, is greatest; a layer that holds
    more than half of the bytes is quiet in any case, and where clients differ alike in all layers
    none is. It is decided while all layers still travel, once for each model. With a
    number those are quiet whose D_l is below this share of the mean over layers. A layer that is
    not due is not sent in either direction and each client goes on with its own. In every
    ``alpha``-th round all are due, and D_l is measured anew. A client that missed a layer's last
    mean gets it when it comes back.
    """
    if alpha < 1 or start < 1 or not (share == "auto" or 0 <= share <= 1):
        raise ConfigError(
            "layer-wise aggregation: alpha and start must be 1 or more and share from 0 to 1 or "
            f'"auto", not {alpha}, {start} and {share}'
        )
    if alpha == 1:
        return inner
    if inner.needs_all_layers:
        raise ConfigError(f"{inner.name} {inner.needs_all_layers}: leave out layer_interval")

    word = "share" if inner.name == "dc-pfl" else "layer_share"  # what its parameter is called

    def round(fed: Federation, state: State, info: Round) -> State:
        whole = info.number < start or (info.number - start) % alpha == alpha - 1
        rule = partial(quiet_layers, share=share)
        paced = _Paced(fed, Pace.remembered(state), info.number, whole, rule)
        resting = not whole and any(paced.pace.quiet.values())
        moved = inner.round(paced, state, info)
        # A model that is not one of this round's means is nobody's last upload: it goes out whole.
        kept = {str(s) for s, m in moved.models.items() if m is state.models.get(s)}
        paced.pace.forget_all_but(kept | paced.averaged & {str(s) for s in moved.models})
        quiet = {slot: sorted(layers) for slot, layers in paced.pace.quiet.items()}
        notes: dict[str, Any] = {"all_due": whole, "quiet": quiet}
        at_end: dict[str, Any] = dict(moved.notes.get("warning_at_end", {}))
        at_end["layers"] = AT_REST if resting else ""
        if paced.measured:
            notes["discrepancy"] = paced.measured
            at_end[word] = "" if share == "auto" else never_quiet(word, share, paced.pace.smallest)
        return replace(
            moved,
            memory={**moved.memory, KEY: paced.pace.to_tree()},
            notes={
                **moved.notes,
                "layers": notes,
                **({"warning_at_end": at_end} if at_end else {}),
            },
        )

    def sends(state: State, client: ClientId) -> Mapping[str, Array]:
        return Pace.remembered(state).lacking(client, inner.sends(state, client))

    def assemble(client: Client, arrays: Mapping[str, Array]) -> Weights:
        return inner.assemble(client, _filled(client, arrays))

    tasks = {name: _paced_task(task) for name, task in inner.tasks.items()}
    pace = {"alpha": alpha, "share": share, "start": start}
    source = inner.source and Source(__name__, "paced", {"inner": asdict(inner.source), **pace})
    return replace(
        inner,
        round=round,
        sends=sends,
        assemble=assemble,
        tasks=tasks,
        source=source,
        pieces=None,
        needs_all_layers=RESTS,
        no_step="lets layers rest, which a step would move unseen",
    )


def paced(inner: Mapping[str, Any], **pace: Any) -> Method:
    """A paced method again, from where the one inside comes from: so it travels by name."""
    return layer_wise(Source(**inner).make(), **pace)


@dataclass
class Pace:
    """What the server knows of layers: when each was last averaged, and who has which.

    ``had[client]`` is the slot and the round of the client's last upload; ``fresh[slot][layer]``
    the round of the layer's last mean: a client lacks the layers averaged in or after the round of
    its upload, and all of a slot that is not its own. ``quiet[slot]`` are the layers that can wait.
    ``smallest`` is the smallest discrepancy of a layer so far, as a share of the mean over layers.
    """

    had: dict[ClientId, tuple[str, int]] = field(default_factory=dict)
    fresh: dict[str, dict[str, int]] = field(default_factory=dict)
    quiet: dict[str, list[str]] = field(default_factory=dict)
    smallest: float = math.inf

    @staticmethod
    def remembered(state: State) -> Pace:
        """From the server's memory; its own copy."""
        kept = state.memory.get(KEY, {})
        return Pace(
            dict(kept.get("had", {})),
            {slot: dict(rounds) for slot, rounds in kept.get("fresh", {}).items()},
            dict(kept.get("quiet", {})),
            kept.get("smallest", math.inf),
        )

    def to_tree(self) -> dict[str, Any]:
        """For the server's memory."""
        known = {"smallest": self.smallest} if math.isfinite(self.smallest) else {}
        return {"had": self.had, "fresh": self.fresh, "quiet": self.quiet, **known}

    def forget_all_but(self, slots: set[str]) -> None:
        """Models that are gone have no layers to keep account of."""
        self.fresh = {s: rounds for s, rounds in self.fresh.items() if s in slots}
        self.quiet = {s: layers for s, layers in self.quiet.items() if s in slots}

    def rests(self, client: ClientId, slot: Slot, layout: Layout) -> bool:
        """Whether this client goes on with layers of its own in its group's model."""
        name, last = self.had.get(client, ("", -1))
        rounds = self.fresh.get(name, {})
        return name == str(slot) and any(rounds.get(y, last) < last for y in layers_of(layout))

    def lacking(self, client: ClientId, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """What of these models the client does not have already."""
        slot, last = self.had.get(client, ("", -1))
        found = dict(arrays)
        for name, model in arrays.items():
            if isinstance(model, Weights) and name == slot:
                rounds = self.fresh.get(name, {})
                layers = layers_of(model.layout)
                found[name] = model.only([y for y in layers if rounds.get(y, last) >= last])
        return found


@dataclass
class _Paced:
    """A federation through which only due layers travel."""

    fed: Federation
    pace: Pace
    round: int
    whole: bool
    rule: Callable[[Mapping[str, float], Mapping[str, int], list[str] | None], list[str] | None]
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    averaged: set[str] = field(default_factory=set)

    @property
    def clients(self) -> Sequence[ClientId]:
        return self.fed.clients

    @property
    def min_group(self) -> int:
        return self.fed.min_group

    @property
    def plain_means(self) -> bool:
        return self.fed.plain_means  # of the layers that travel; in a trial, these are all

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Whoever wants to see each reply gets whole models; all layers count as averaged."""
        replies = self.fed.gather(orders)
        offered = {o.client: list(o.arrays) for o in orders}
        for reply in replies:
            model, slots = reply.arrays.get("model"), offered[reply.client]
            if isinstance(model, Weights) and len(slots) == 1:
                self._averaged(slots[0], model.layout, [reply.client])
        return replies

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        means = self.fed.reduce([self._order(o, into) for o in orders], into, by_examples)
        offered = {o.client: set(o.arrays) for o in orders}
        sizes = _sizes(orders)
        for slot, mean in means.items():
            model = mean.arrays.get("model")
            if not isinstance(model, Weights):
                continue
            # Where a reply goes into many means, the client's own is the one it started from.
            own = [c for c in mean.clients if str(slot) in offered[c] or not offered[c]]
            self._averaged(str(slot), model.layout, own)
            self._judge(str(slot), mean.metrics, sizes)
        return means

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        return self.fed.average(replies, into, by_examples)

    def _order(self, order: Order, into: Mixing) -> Order:
        arrays = self.pace.lacking(order.client, order.arrays)
        slots = order.arrays if isinstance(into, Chosen) else into.get(order.client, {})
        quiet = [set(self.pace.quiet.get(str(s), [])) for s in slots]
        resting = set.intersection(*quiet) if quiet else set()
        if self.whole or order.config.get(WHOLE) or not resting:
            return replace(order, arrays=arrays)
        config = {**order.config, KEY: ",".join(sorted(resting))}
        return replace(order, arrays=arrays, config=config)

    def _averaged(self, slot: str, layout: Layout, clients: Sequence[ClientId]) -> None:
        self.pace.fresh.setdefault(slot, {}).update(dict.fromkeys(layers_of(layout), self.round))
        self.pace.had.update(dict.fromkeys(clients, (slot, self.round)))
        self.averaged.add(slot)

    def _judge(self, slot: str, metrics: Mapping[str, float], sizes: Mapping[str, int]) -> None:
        """Which layers can wait, from the discrepancies that the group reports."""
        prefix = f"{KEY}."
        found = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
        if found:
            mean = sum(found.values()) / len(found)
            quiet = self.rule(found, sizes, self.pace.quiet.get(slot))
            self.pace.quiet |= {} if quiet is None else {slot: quiet}
            self.measured[slot] = found
            if mean:
                self.pace.smallest = min(self.pace.smallest, min(found.values()) / mean)


def quiet_layers(
    gaps: Mapping[str, float],
    sizes: Mapping[str, int],
    known: list[str] | None,
    share: float | Literal["auto"],
) -> list[str] | None:
    """The layers that can wait, from their discrepancies for each of their parameters.

    ``known`` are the quiet layers so far. "auto" keeps them: those that rested have had longer to
    drift apart than the others, and cannot be compared with them any more. It cannot tell where
    there are no discrepancies at all, as in a mean of one client.

    >>> gaps, sizes = {"a": 0.1, "b": 0.4, "c": 0.3}, {"a": 10, "b": 80, "c": 10}
    >>> quiet_layers(gaps, sizes, None, 0.9), quiet_layers(gaps, sizes, None, "auto")
    (['a'], ['a', 'b'])
    >>> quiet_layers(gaps, sizes, ["b", "c"], "auto")
    ['b', 'c']
    """
    if share != "auto":
        mean = sum(gaps.values()) / len(gaps)
        return [y for y, gap in gaps.items() if gap < share * mean]
    if known is not None or not any(gaps.values()):
        return known
    if len(gaps) == 1 or max(gaps.values()) <= min(gaps.values()) * (1 + _ROUNDING):
        return []
    small = [y for y in gaps if 2 * sizes[y] <= sum(sizes[z] for z in gaps)]
    awake = max(small, key=lambda y: gaps[y])
    return [y for y in gaps if y != awake]


def _sizes(orders: Sequence[Order]) -> dict[str, int]:
    """How many parameters each layer has."""
    models = (m for o in orders for m in o.arrays.values() if isinstance(m, Weights))
    largest = max((m.layout for m in models), key=lambda layout: layout.size, default=None)
    sizes: dict[str, int] = {}
    for entry in largest.entries if largest is not None else ():
        if entry.kind == "parameter":
            sizes[entry.layer] = sizes.get(entry.layer, 0) + entry.size
    return sizes


def never_quiet(word: str, share: float, smallest: float) -> str:
    """A warning that no layer was ever below the share under which layers rest; "" if one was."""
    if not share or smallest < share or smallest == math.inf:
        return ""
    return (
        f"{word} = {share:g} never bound: the layer in which clients differed least had "
        f"{smallest:.3g} of the mean discrepancy, so no layer ever rested"
    )


def layers_of(layout: Layout) -> list[str]:
    """The layers of a layout, in its own order; one that holds buffers only is a layer too."""
    return list(dict.fromkeys(e.layer for e in layout.entries))


def _filled(client: Client, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The models received, each completed with the client's own layers where some are missing."""
    own, slot, found = client.kept(KEY), client.state.get(SLOT, ""), dict(arrays)
    for name, model in arrays.items():
        if not isinstance(model, Weights) or own is None or slot not in ("", name):
            continue
        if model.layout.size < own.layout.size:
            found[name] = model.onto(own)
    return found


def _paced_task(task: Task) -> Task:
    """The task, with its models completed before and its upload thinned out after."""

    def run(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        before, resting = client.kept(KEY), str(config.get(KEY, ""))
        plain = {k: v for k, v in config.items() if k not in (KEY, WHOLE)}
        upload = task(client, _filled(client, arrays), plain)
        model = upload.arrays.get("model")
        if not isinstance(model, Weights):
            return upload
        # Of many models received, the mean that the last upload went into is the one to compare.
        slot = upload.delta_of.get("model", "")
        received = arrays.get(slot) if slot else next(iter(arrays.values()), None)
        same = client.state.get(SLOT, "") == slot and (slot or len(arrays) == 1)
        # Only the mean of the round of that upload tells how far apart the group was.
        same = same and client.round == int(str(client.state.get(ROUND, -2))) + 1
        client.state[KEY], client.state[SLOT], client.state[ROUND] = model, slot, client.round
        metrics = dict(upload.metrics)
        whole = isinstance(received, Weights) and received.layout == model.layout
        if before is not None and received is not None and same and whole:
            gaps = discrepancy(before, received)
            metrics |= {f"{KEY}.{layer}": gap for layer, gap in gaps.items()}
        if resting:
            due = [y for y in layers_of(model.layout) if y not in resting.split(",")]
            model = model.only(due)
        return replace(upload, arrays={**upload.arrays, "model": model}, metrics=metrics)

    return run


def discrepancy(sent: Weights, received: Weights) -> dict[str, float]:
    """Layer by layer, the mean absolute difference of two models, each layer scaled to [0, 1]."""
    found = {}
    for layer in layers_of(sent.layout):
        pair = [w.only([layer]).parameters.numpy()[None] for w in (sent, received)]
        if pair[0].size:
            found[layer] = float(abs(min_max(pair[0]) - min_max(pair[1])).mean())
    return found
