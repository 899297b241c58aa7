"""Layer-wise aggregation: layers in which a group's clients hardly differ are averaged less often.

The wrapper works with any averaging method: it wraps the federation that the method uses on the
server, and the tasks that it runs on clients.
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

KEY = "layer-wise"  # the key in the server's memory, client state, orders and metrics
ROUND = f"{KEY}.round"  # the round of a client's last upload
SLOT = f"{KEY}.slot"  # the slot of a client's last upload, if the task has one
RESTS = "skips layers in some rounds already"  # why layer-wise aggregation cannot be applied twice
_ROUNDING = 1e-9  # relative differences between discrepancies below this are ignored
AT_REST = (
    "in the last round some layers were not averaged, and clients were scored with their own; to "
    "compare with methods that average all layers, use a round in which all were due (notes.layers)"
)
WHOLE = "whole"  # an order with this key in its config is answered with all layers


def layer_wise(
    inner: Method, alpha: int = 3, share: float | Literal["auto"] = "auto", start: int = 5
) -> Method:
    """Wrap a method so that quiet layers are averaged only every ``alpha`` rounds.

    Each client compares the model it sent with the mean it then receives, layer by layer:
    D_l = ‖S(w_l,i) − S(w_l,g)‖₁/dim, where S scales a layer to [0, 1]. After the first ``start``
    rounds, quiet layers are due every ``alpha`` rounds and the others in every round. With
    ``share`` "auto", all layers are quiet except the one with the largest D_l, averaged over the
    group. A layer with more than half of the parameters is always quiet, and no layer is quiet if
    clients differ equally in all layers. This is decided once for each model, while all layers are
    still exchanged. If ``share`` is a number, the layers whose D_l is below this share of the mean
    over layers are quiet. A layer that is not due is not sent in either direction, and each client
    continues with its own. Every ``alpha``-th round, all layers are due and D_l is measured again.
    A client that missed a layer's last mean receives it when it comes back.
    """
    if alpha < 1 or start < 1 or not (share == "auto" or 0 <= share <= 1):
        raise ConfigError(
            "layer-wise aggregation: alpha and start must be 1 or more and share from 0 to 1 or "
            f'"auto", not {alpha}, {start} and {share}'
        )
    if alpha == 1:
        return inner
    if inner.needs_all_layers:
        raise ConfigError(f"{inner.name} {inner.needs_all_layers}: remove layer_interval")

    # The method's name for ``share``.
    name = "share" if inner.name == "dc-pfl" else "layer_share"

    def round(fed: Federation, state: State, info: Round) -> State:
        all_due = info.number < start or (info.number - start) % alpha == alpha - 1
        rule = partial(quiet_layers, share=share)
        proxy = _LayerwiseFederation(fed, LayerRecord.remembered(state), info.number, all_due, rule)
        resting = not all_due and any(proxy.record.quiet.values())
        after = inner.round(proxy, state, info)
        # A model that is not one of this round's means was uploaded by no client: send all of it.
        unchanged = {str(s) for s, m in after.models.items() if m is state.models.get(s)}
        proxy.record.forget_all_but(unchanged | proxy.averaged & {str(s) for s in after.models})
        quiet = {slot: sorted(layers) for slot, layers in proxy.record.quiet.items()}
        notes: dict[str, Any] = {"all_due": all_due, "quiet": quiet}
        at_end: dict[str, Any] = dict(after.notes.get("warning_at_end", {}))
        at_end["layers"] = AT_REST if resting else ""
        if proxy.measured:
            notes["discrepancy"] = proxy.measured
            at_end[name] = (
                "" if share == "auto" else never_quiet(name, share, proxy.record.smallest)
            )
        return replace(
            after,
            memory={**after.memory, KEY: proxy.record.to_tree()},
            notes={
                **after.notes,
                "layers": notes,
                **({"warning_at_end": at_end} if at_end else {}),
            },
        )

    def sends(state: State, client: ClientId) -> Mapping[str, Array]:
        return LayerRecord.remembered(state).lacking(client, inner.sends(state, client))

    def assemble(client: Client, arrays: Mapping[str, Array]) -> Weights:
        return inner.assemble(client, _completed(client, arrays))

    tasks = {name: _layerwise_task(task) for name, task in inner.tasks.items()}
    settings = {"alpha": alpha, "share": share, "start": start}
    source = inner.source and Source(
        __name__, "rebuild", {"inner": asdict(inner.source), **settings}
    )
    return replace(
        inner,
        round=round,
        sends=sends,
        assemble=assemble,
        tasks=tasks,
        source=source,
        pieces=None,
        needs_all_layers=RESTS,
        no_step="skips layers in some rounds, which an optimizer's step would change",
    )


def rebuild(inner: Mapping[str, Any], **settings: Any) -> Method:
    """Rebuild the method from the source of the inner one, so that it can be sent by name."""
    return layer_wise(Source(**inner).make(), **settings)


@dataclass
class LayerRecord:
    """The server's record of layers: when each was last averaged, and which clients have it.

    ``had[client]`` is the slot and the round of the client's last upload, ``fresh[slot][layer]``
    the round of the layer's last mean. A client lacks the layers averaged in or after the round of
    its last upload, and all layers of other slots. ``quiet[slot]`` are the quiet layers, and
    ``smallest`` is the smallest discrepancy of a layer so far, relative to the mean over layers.
    """

    had: dict[ClientId, tuple[str, int]] = field(default_factory=dict)
    fresh: dict[str, dict[str, int]] = field(default_factory=dict)
    quiet: dict[str, list[str]] = field(default_factory=dict)
    smallest: float = math.inf

    @staticmethod
    def remembered(state: State) -> LayerRecord:
        """Restore a copy from the server's memory."""
        memory = state.memory.get(KEY, {})
        return LayerRecord(
            dict(memory.get("had", {})),
            {slot: dict(rounds) for slot, rounds in memory.get("fresh", {}).items()},
            dict(memory.get("quiet", {})),
            memory.get("smallest", math.inf),
        )

    def to_tree(self) -> dict[str, Any]:
        """The record as a tree for the server's memory."""
        smallest = {"smallest": self.smallest} if math.isfinite(self.smallest) else {}
        return {"had": self.had, "fresh": self.fresh, "quiet": self.quiet, **smallest}

    def forget_all_but(self, slots: set[str]) -> None:
        """Drop the records of models that no longer exist."""
        self.fresh = {s: rounds for s, rounds in self.fresh.items() if s in slots}
        self.quiet = {s: layers for s, layers in self.quiet.items() if s in slots}

    def rests(self, client: ClientId, slot: Slot, layout: Layout) -> bool:
        """Whether this client continues with some layers of its own instead of its group's."""
        last_slot, last_round = self.had.get(client, ("", -1))
        rounds = self.fresh.get(last_slot, {})
        return last_slot == str(slot) and any(
            rounds.get(y, last_round) < last_round for y in layers_of(layout)
        )

    def lacking(self, client: ClientId, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The parts of these models that the client does not have yet."""
        slot, last_round = self.had.get(client, ("", -1))
        missing = dict(arrays)
        for name, model in arrays.items():
            if isinstance(model, Weights) and name == slot:
                rounds = self.fresh.get(name, {})
                layers = layers_of(model.layout)
                missing[name] = model.only(
                    [y for y in layers if rounds.get(y, last_round) >= last_round]
                )
        return missing


@dataclass
class _LayerwiseFederation:
    """A federation that exchanges only the layers that are due."""

    fed: Federation
    record: LayerRecord
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
        return self.fed.plain_means  # of the exchanged layers; in a trial, these are all layers

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Exchange whole models, as a method may look at each reply; all layers are averaged."""
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
            # A reply may contribute to many means, but the client trained only one of the models.
            members = [c for c in mean.clients if str(slot) in offered[c] or not offered[c]]
            self._averaged(str(slot), model.layout, members)
            self._judge(str(slot), mean.metrics, sizes)
        return means

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        return self.fed.average(replies, into, by_examples)

    def _order(self, order: Order, into: Mixing) -> Order:
        arrays = self.record.lacking(order.client, order.arrays)
        slots = order.arrays if isinstance(into, Chosen) else into.get(order.client, {})
        quiet = [set(self.record.quiet.get(str(s), [])) for s in slots]
        resting = set.intersection(*quiet) if quiet else set()
        if self.whole or order.config.get(WHOLE) or not resting:
            return replace(order, arrays=arrays)
        config = {**order.config, KEY: ",".join(sorted(resting))}
        return replace(order, arrays=arrays, config=config)

    def _averaged(self, slot: str, layout: Layout, clients: Sequence[ClientId]) -> None:
        self.record.fresh.setdefault(slot, {}).update(dict.fromkeys(layers_of(layout), self.round))
        self.record.had.update(dict.fromkeys(clients, (slot, self.round)))
        self.averaged.add(slot)

    def _judge(self, slot: str, metrics: Mapping[str, float], sizes: Mapping[str, int]) -> None:
        """Decide which layers are quiet, from the discrepancies that the group reports."""
        prefix = f"{KEY}."
        discrepancies = {
            k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)
        }
        if discrepancies:
            mean = sum(discrepancies.values()) / len(discrepancies)
            quiet = self.rule(discrepancies, sizes, self.record.quiet.get(slot))
            self.record.quiet |= {} if quiet is None else {slot: quiet}
            self.measured[slot] = discrepancies
            if mean:
                self.record.smallest = min(self.record.smallest, min(discrepancies.values()) / mean)


def quiet_layers(
    gaps: Mapping[str, float],
    sizes: Mapping[str, int],
    before: list[str] | None,
    share: float | Literal["auto"],
) -> list[str] | None:
    """Find the quiet layers by their discrepancies per parameter, which are given in ``gaps``.

    ``before`` are the layers that have been quiet until now. "auto" keeps them: they have had
    longer to drift apart than the others, so their discrepancies are not comparable any more. The
    result is None, for undecided, if all discrepancies are zero, as in a mean of a single client.

    >>> gaps, sizes = {"a": 0.1, "b": 0.4, "c": 0.3}, {"a": 10, "b": 80, "c": 10}
    >>> quiet_layers(gaps, sizes, None, 0.9), quiet_layers(gaps, sizes, None, "auto")
    (['a'], ['a', 'b'])
    >>> quiet_layers(gaps, sizes, ["b", "c"], "auto")
    ['b', 'c']
    """
    if share != "auto":
        mean = sum(gaps.values()) / len(gaps)
        return [y for y, gap in gaps.items() if gap < share * mean]
    if before is not None or not any(gaps.values()):
        return before
    if len(gaps) == 1 or max(gaps.values()) <= min(gaps.values()) * (1 + _ROUNDING):
        return []
    small = [y for y in gaps if 2 * sizes[y] <= sum(sizes[z] for z in gaps)]
    due = max(small, key=lambda y: gaps[y])
    return [y for y in gaps if y != due]


def _sizes(orders: Sequence[Order]) -> dict[str, int]:
    """The number of parameters of each layer."""
    models = (m for o in orders for m in o.arrays.values() if isinstance(m, Weights))
    largest = max((m.layout for m in models), key=lambda layout: layout.size, default=None)
    sizes: dict[str, int] = {}
    for entry in largest.entries if largest is not None else ():
        if entry.kind == "parameter":
            sizes[entry.layer] = sizes.get(entry.layer, 0) + entry.size
    return sizes


def never_quiet(word: str, share: float, smallest: float) -> str:
    """A warning that no layer was ever quiet, or an empty string."""
    if not share or smallest < share or smallest == math.inf:
        return ""
    return (
        f"{word} = {share:g} had no effect: the layer in which clients differed least had "
        f"{smallest:.3g} of the mean discrepancy, so no layer was ever quiet"
    )


def layers_of(layout: Layout) -> list[str]:
    """The layers of a layout, in order, including those that have only buffers."""
    return list(dict.fromkeys(e.layer for e in layout.entries))


def _completed(client: Client, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The received models, with missing layers completed by the client's own."""
    last_sent, slot, completed = client.kept(KEY), client.state.get(SLOT, ""), dict(arrays)
    for name, model in arrays.items():
        if not isinstance(model, Weights) or last_sent is None or slot not in ("", name):
            continue
        if model.layout.size < last_sent.layout.size:
            completed[name] = model.onto(last_sent)
    return completed


def _layerwise_task(task: Task) -> Task:
    """Wrap a task: complete its models before, and remove layers that are not due after."""

    def run(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        last_sent, resting = client.kept(KEY), str(config.get(KEY, ""))
        plain = {k: v for k, v in config.items() if k not in (KEY, WHOLE)}
        upload = task(client, _completed(client, arrays), plain)
        model = upload.arrays.get("model")
        if not isinstance(model, Weights):
            return upload
        # With several received models, compare the one whose mean included the last upload.
        slot = upload.delta_of.get("model", "")
        received = arrays.get(slot) if slot else next(iter(arrays.values()), None)
        comparable = client.state.get(SLOT, "") == slot and (slot or len(arrays) == 1)
        # Only the mean of that upload's round shows how different the group's clients were.
        comparable = comparable and client.round == int(str(client.state.get(ROUND, -2))) + 1
        client.state[KEY], client.state[SLOT], client.state[ROUND] = model, slot, client.round
        metrics = dict(upload.metrics)
        complete = isinstance(received, Weights) and received.layout == model.layout
        if last_sent is not None and received is not None and comparable and complete:
            discrepancies = discrepancy(last_sent, received)
            metrics |= {f"{KEY}.{layer}": value for layer, value in discrepancies.items()}
        if resting:
            due = [y for y in layers_of(model.layout) if y not in resting.split(",")]
            model = model.only(due)
        return replace(upload, arrays={**upload.arrays, "model": model}, metrics=metrics)

    return run


def discrepancy(sent: Weights, received: Weights) -> dict[str, float]:
    """The mean absolute difference of two models by layer, with layers scaled to [0, 1]."""
    discrepancies = {}
    for layer in layers_of(sent.layout):
        pair = [w.only([layer]).parameters.numpy()[None] for w in (sent, received)]
        if pair[0].size:
            discrepancies[layer] = float(abs(min_max(pair[0]) - min_max(pair[1])).mean())
    return discrepancies
