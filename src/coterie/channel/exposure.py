"""The exposure ledger: which single clients' vectors, and which sums, the server has seen.

It records what reached the server, whether the method used it or not: without secure aggregation,
every reply does, even if only a mean is used. Rounds are numbered as in the events, 0 being before
the first. What the server saw in an abandoned round stays in the ledger; what it saw between the
last checkpoint and a crash is missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from coterie.core.messages import ClientId, Slot
from coterie.core.tree import Tree
from coterie.errors import CoterieError, unknown

PLAIN = "none"
CONSENT = "revealed by consent"
LOCAL_NOISE = "local noise"  # added by the client
AVERAGED = "none, averaged on arrival"  # the method used only the mean
CENTRAL_NOISE = "central noise"  # added by the server to what it released
OF_ONE_ALONE = "none, a mean of one"  # a mean of one client is that client's vector
SECURE = "secure"
SECURE_NOISED = "secure, noised"
OF_ONE = (PLAIN, OF_ONE_ALONE, CONSENT, LOCAL_NOISE, AVERAGED, CENTRAL_NOISE)
OF_SUMS = (PLAIN, SECURE, SECURE_NOISED)

EXAMPLES = 5  # pairs of sums that a summary lists
_PAIRS = 1000  # pairs that are stored; all are counted

Arrays = Mapping[str, Iterable[str]]  # array -> its layers, none for a plain tensor
_Parts = frozenset[tuple[str, str]]  # array and layer


@dataclass(frozen=True)
class Near:
    """Two sums over nearly the same clients; ``clients`` are those in only one of the sums."""

    task: str
    rounds: tuple[int, int]
    slots: tuple[Slot, Slot]
    clients: tuple[ClientId, ...]


@dataclass(slots=True)
class _Span:
    """The number of rounds in which something was seen, and the first and the last of them."""

    rounds: int = 0
    first: int = 0
    last: int = 0

    @property
    def span(self) -> tuple[int, int, int]:
        """The three numbers as a tuple."""
        return self.rounds, self.first, self.last

    def note(self, round: int) -> bool:
        """Count a round, which must not precede the last one; False if it was counted already."""
        if self.rounds and round == self.last:
            return False
        self.first = self.first if self.rounds else round
        self.rounds, self.last = self.rounds + 1, round
        return True


@dataclass(slots=True)
class _Client(_Span):
    """When an array of one client was seen, and in how many rounds with which set of layers."""

    now: int = 0  # the number of the last round's set
    sets: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Array(_Span):
    """When an array was seen of any client, and of which clients."""

    clients: dict[ClientId, _Client] = field(default_factory=dict)

    def columns(self) -> tuple[list[list[int]], list[list[int]]]:
        """The clients and their sets of layers as columns, which are quick to write."""
        of, sets = (
            self.clients.values(),
            [
                (client, number, rounds)
                for client, seen in self.clients.items()
                for number, rounds in seen.sets.items()
            ],
        )
        spans = [[s.rounds for s in of], [s.first for s in of], [s.last for s in of]]
        clients = [list(self.clients), *spans, [s.now for s in of]]
        return clients, [[row[i] for row in sets] for i in range(3)]


@dataclass(slots=True)
class _Sums(_Span):
    """The number of sums with one protection, and the smallest and largest numbers of clients."""

    count: int = 0
    smallest: int = 0
    largest: int = 0

    def add(self, round: int, clients: int) -> None:
        self.note(round)
        self.smallest = min(self.smallest, clients) if self.count else clients
        self.largest, self.count = max(self.largest, clients), self.count + 1


@dataclass
class _Held:
    """The sums of one round, task and set of parts, indexed by client."""

    round: int
    parts: _Parts
    sums: list[tuple[Slot, frozenset[ClientId]]] = field(default_factory=list)
    _known: set[frozenset[ClientId]] = field(default_factory=set)
    _of: dict[ClientId, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, slot: Slot, clients: frozenset[ClientId]) -> None:
        self._known.add(clients)
        for client in clients:
            self._of[client].append(len(self.sums))
        self.sums.append((slot, clients))

    def has(self, clients: frozenset[ClientId]) -> bool:
        """Whether there is a sum over the same clients."""
        return clients in self._known

    def near(
        self, clients: frozenset[ClientId], least: int
    ) -> list[tuple[Slot, frozenset[ClientId]]]:
        """The sums that share clients with these and differ in fewer than ``least``.

        Returns their slots and the clients in which they differ. The time depends on the number of
        clients, not on the number of sums without them.
        """
        common = Counter(i for c in clients for i in self._of.get(c, ()))
        near = []
        for i, shared in sorted(common.items()):
            slot, others = self.sums[i]
            if 0 < len(clients) + len(others) - 2 * shared < least:
                near.append((slot, clients ^ others))
        return near


@dataclass
class Exposure:
    """The ledger of what the server has seen of the clients' updates.

    ``layers`` are all shared layers of the model and ``members`` is the number of clients, from
    which sentences such as "all layers of every client" are made. Sums whose clients differ in
    fewer than ``least`` are recorded as near. ``reveals`` is what the user allows to be shown, such
    as "final-layer".
    """

    layers: Sequence[str] = ()
    members: int = 0
    least: int = 3
    reveals: str = ""
    secure: bool = False
    round: int = 0
    abandoned: int = 0
    _seen: dict[tuple[str, str], _Array] = field(default_factory=dict)
    _spans: dict[str, _Span] = field(default_factory=dict)
    _sums: dict[str, _Sums] = field(default_factory=dict)
    _held: dict[str, dict[_Parts, list[_Held]]] = field(default_factory=dict)
    _near: list[Near] = field(default_factory=list)
    _counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _sets: list[tuple[str, ...]] = field(default_factory=list)
    _numbers: dict[tuple[str, ...], int] = field(default_factory=dict)
    _latest: int = -1

    # --- what happens ---------------------------------------------------------------------------

    def abandon(self) -> None:
        """Note that the round was abandoned; what the server has seen in it stays recorded."""
        self.abandoned += self._latest == self.round

    def single(self, client: ClientId, round: int, arrays: Arrays, protection: str) -> None:
        """Record that vectors of a single client reached the server."""
        if protection not in OF_ONE:
            raise CoterieError(unknown("protection of a client's vector", protection, OF_ONE))
        if not arrays:
            return
        self._latest = round
        self._spans.setdefault(protection, _Span()).note(round)
        for name, layers in arrays.items():
            array = self._seen.setdefault((name, protection), _Array())
            array.note(round)
            seen, number = array.clients.setdefault(client, _Client()), self._number(tuple(layers))
            if not seen.note(round):  # a second time in this round: count the union of layers
                seen.sets[seen.now] -= 1
                number = self._union(seen.now, number)
            seen.now = number
            seen.sets[number] = seen.sets.get(number, 0) + 1

    def sum(
        self,
        round: int,
        task: str,
        slot: Slot,
        clients: Collection[ClientId],
        arrays: Arrays,
        protection: str,
    ) -> None:
        """Record that the server learned a sum over these clients; for one client, its vector."""
        if protection not in OF_SUMS:
            raise CoterieError(unknown("protection of a sum", protection, OF_SUMS))
        summed = frozenset(clients)
        if not summed or not arrays:
            return
        self._latest, layers = round, {name: tuple(of) for name, of in arrays.items()}
        if len(summed) == 1:
            of_one = LOCAL_NOISE if protection == SECURE_NOISED else PLAIN
            self.single(next(iter(summed)), round, layers, of_one)
        else:
            self._sums.setdefault(protection, _Sums()).add(round, len(summed))
        parts = frozenset((name, layer) for name, of in layers.items() for layer in of or ("",))
        self._compare(round, task, slot, summed, parts)

    def _compare(
        self, round: int, task: str, slot: Slot, summed: frozenset[ClientId], parts: _Parts
    ) -> None:
        """Record the sums that this one can be subtracted from, and keep it for later ones."""
        same_parts = self._held.setdefault(task, {}).setdefault(parts, [])
        if not same_parts or same_parts[-1].round != round:
            same_parts.append(_Held(round, parts))
            del same_parts[:-2]
        if same_parts[-1].has(summed):
            return  # the server has learned this sum already
        for held in self._before(task, round, parts):
            for other, clients in held.near(summed, self.least):
                pair = Near(task, (held.round, round), (other, slot), tuple(sorted(clients)))
                self._counts[len(clients)] += 1
                if len(self._near) < _PAIRS:
                    self._near.append(pair)
        same_parts[-1].add(slot, summed)

    def _before(self, task: str, round: int, parts: _Parts) -> list[_Held]:
        """This round's sums, and for each part those of the last earlier round that had it."""
        all_held = [held for kept in self._held[task].values() for held in kept]
        all_held.sort(key=lambda held: held.round)
        earlier = [held for held in all_held if held.round < round]
        last = {p: held.round for held in earlier for p in held.parts & parts}
        return [
            held
            for held in all_held
            if any(held.round >= last.get(p, held.round) for p in held.parts & parts)
        ]

    def _number(self, layers: tuple[str, ...]) -> int:
        """The number of a set of layers; each set is stored once."""
        number = self._numbers.get(layers)
        if number is None:
            number = self._numbers[layers] = len(self._sets)
            self._sets.append(layers)
        return number

    def _union(self, one: int, other: int) -> int:
        if one == other:
            return one
        return self._number(tuple(dict.fromkeys(self._sets[one] + self._sets[other])))

    # --- what is reported -----------------------------------------------------------------------

    def near(self, least: int) -> list[Near]:
        """Pairs of sums whose clients differ, but in fewer than ``least``; at most 1000 pairs.

        A sum is compared with those of its round and of the last round that had the same arrays.
        The difference of a pair involves only the clients that are in one of the two sums.
        """
        if least > self.least:
            raise CoterieError(
                f"only pairs of sums that differ in fewer than {self.least} clients were recorded"
            )
        return [pair for pair in self._near if len(pair.clients) < least]

    def rows(self) -> list[dict[str, Any]]:
        """The ledger as a table, with a row for each client, array and protection.

        ``layer_rounds`` holds, for each of the ``layers``, the number of rounds in which it was
        seen.
        """
        rows = []
        for (name, protection), array in self._seen.items():
            for client, seen in array.clients.items():
                counts: dict[str, int] = defaultdict(int)
                for number, rounds in seen.sets.items():
                    for layer in self._sets[number]:
                        counts[layer] += rounds
                row = {
                    "client": client,
                    "array": name,
                    "protection": protection,
                    "layers": " ".join(counts),
                    "layer_rounds": " ".join(map(str, counts.values())),
                    "rounds": seen.rounds,
                    "first": seen.first,
                    "last": seen.last,
                }
                rows.append(row)
        return sorted(rows, key=lambda r: (r["client"], r["array"], r["protection"]))

    def summary(self) -> dict[str, Any]:
        """A summary of the ledger, as values for JSON."""
        single = {p: self._single(p, self._spans[p]) for p in OF_ONE if p in self._spans}
        revealed = single.get(CONSENT, {}).get("arrays", {})
        # Pairs that differ in the fewest clients first, and pairs within a round before others.
        pairs = sorted(self._near, key=lambda n: (len(n.clients), n.rounds[0] != n.rounds[1]))
        return {
            "clients": self.members,
            "layers": list(self.layers),
            "single": single,
            "sums": {p: asdict(self._sums[p]) for p in OF_SUMS if p in self._sums},
            "near": {
                "least": self.least,
                "count": sum(self._counts.values()),
                "by_difference": {str(n): self._counts[n] for n in sorted(self._counts)},
                "examples": [
                    {
                        "task": n.task,
                        "rounds": list(n.rounds),
                        "slots": list(n.slots),
                        "clients": list(n.clients),
                    }
                    for n in pairs[:EXAMPLES]
                ],
            },
            "revealed": [{"by": self.reveals, "array": a, **of} for a, of in revealed.items()],
            "abandoned": self.abandoned,
            "secure": self.secure,
        }

    def _single(self, protection: str, span: _Span) -> dict[str, Any]:
        arrays, clients = {}, set[ClientId]()
        for (name, array_protection), array in self._seen.items():
            if array_protection == protection:
                clients |= set(array.clients)
                arrays[name] = {
                    "layers": self._layers(array),
                    "clients": len(array.clients),
                    "rounds": array.rounds,
                    "first": array.first,
                    "last": array.last,
                }
        return {"clients": len(clients), **asdict(span), "arrays": arrays}

    def _layers(self, array: _Array) -> list[str]:
        """All layers that were seen of any client, in the model's order."""
        numbers = dict.fromkeys(n for seen in array.clients.values() for n in seen.sets)
        layers = dict.fromkeys(layer for number in numbers for layer in self._sets[number])
        known = [layer for layer in self.layers if layer in layers]
        return list(dict.fromkeys([*known, *layers]))

    def sentences(self) -> list[str]:
        """The ledger in words, as shown at the end of a run."""
        return sentences(self.summary())

    # --- what is saved --------------------------------------------------------------------------

    def to_tree(self) -> dict[str, Tree]:
        """Convert to plain values for a checkpoint."""
        return {
            "settings": (tuple(self.layers), self.members, self.least, self.reveals, self.secure),
            "abandoned": self.abandoned,
            "round": self.round,
            "latest": self._latest,
            "sets": list(self._sets),
            "seen": [(*key, array.span, *array.columns()) for key, array in self._seen.items()],
            "spans": {p: span.span for p, span in self._spans.items()},
            "sums": {p: astuple(sums) for p, sums in self._sums.items()},
            "held": [
                (task, h.round, sorted(h.parts), [(slot, sorted(of)) for slot, of in h.sums])
                for task, kinds in self._held.items()
                for kept in kinds.values()
                for h in kept
            ],
            "near": [(n.task, n.rounds, n.slots, n.clients) for n in self._near],
            "counts": dict(self._counts),
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Tree]) -> Exposure:
        """Restore a ledger from a checkpoint."""
        ledger = Exposure(*tree["settings"])
        ledger.round, ledger.abandoned = tree["round"], tree["abandoned"]
        ledger._latest = tree["latest"]
        for layers in tree["sets"]:
            ledger._number(tuple(layers))
        for name, protection, span, clients, sets in tree["seen"]:
            array = ledger._seen[name, protection] = _Array(*span)
            for client, *numbers in zip(*clients, strict=True):
                array.clients[client] = _Client(*numbers)
            for client, number, rounds in zip(*sets, strict=True):
                array.clients[client].sets[number] = rounds
        ledger._spans.update({p: _Span(*s) for p, s in tree["spans"].items()})
        ledger._sums.update({p: _Sums(*s) for p, s in tree["sums"].items()})
        for task, round, parts, sums in tree["held"]:
            held = _Held(round, frozenset((name, layer) for name, layer in parts))
            for slot, clients in sums:
                held.add(slot, frozenset(clients))
            ledger._held.setdefault(task, {}).setdefault(held.parts, []).append(held)
        ledger._near.extend(Near(*near) for near in tree["near"])
        ledger._counts.update(tree["counts"])
        return ledger


# --- in words ------------------------------------------------------------------------------------

_SENTENCES = {
    PLAIN: "The server saw {what}, unprotected: the method uses each of them.",
    OF_ONE_ALONE: "The server saw {what}, unprotected: a mean of one client is its update.",
    CONSENT: "With consent{by}, the server saw {what}.",
    LOCAL_NOISE: "The server saw {what}, with noise that each client had added.",
    AVERAGED: "The server received {what}, unprotected; the method used only their means.",
    CENTRAL_NOISE: "The server received {what}; only what it released from them has noise.",
}


def sentences(seen: Mapping[str, Any]) -> list[str]:
    """Put a summary into words.

    >>> ledger = Exposure(layers=["in", "out"], members=2)
    >>> for client in (0, 1):
    ...     ledger.single(client, 1, {"model": ["in", "out"]}, AVERAGED)
    >>> ledger.sentences()[0]
    "The server received every client's model (all 2 layers) once, in round 1, unprotected; the ..."
    """
    single, texts = seen["single"], []
    by = next((f" (--reveal {array['by']})" for array in seen["revealed"] if array["by"]), "")
    for protection, text in _SENTENCES.items():
        if protection in single:
            texts.append(text.format(what=_what(seen, single[protection]["arrays"]), by=by))
    if AVERAGED in single and PLAIN not in single and OF_ONE_ALONE not in single:
        texts[-1] += " With --secure it would see only sums."
    texts += _of_sums(seen) + _of_pairs(seen)
    if not texts and seen.get("secure"):
        return ["The server learned no sum: everything it received was masked."]
    if not texts:
        return ["Nothing left the clients."]
    if seen["abandoned"]:
        were = "One round was" if seen["abandoned"] == 1 else f"{seen['abandoned']} rounds were"
        texts.append(f"{were} abandoned: the server saw what had arrived by then.")
    return texts


def sees(seen: Mapping[str, Any]) -> str:
    """The most revealing thing that the server saw, in one word.

    >>> sees(Exposure().summary())
    'nothing'
    """
    words = {PLAIN: "each", OF_ONE_ALONE: "each", CONSENT: "revealed", LOCAL_NOISE: "noised"}
    words |= {AVERAGED: "means", CENTRAL_NOISE: "means"}
    most = [words[p] for p in OF_ONE if p in seen["single"]]
    return [*most, *("sums" for _ in seen["sums"]), "nothing"][0]


def alone_apart(seen: Mapping[str, Any]) -> tuple[str, int, int]:
    """What the server saw but for clients alone in a group; how many these, in how many rounds.

    >>> alone_apart(Exposure().summary())
    ('nothing', 0, 0)
    """
    single = seen["single"]
    lone = single.get(OF_ONE_ALONE)
    if lone is None or PLAIN in single:
        return sees(seen), 0, 0
    others = {kind: span for kind, span in single.items() if kind != OF_ONE_ALONE}
    return sees({**seen, "single": others}), lone["clients"], lone["rounds"]


def server_sees(summary: Mapping[str, Any]) -> str:
    """The same for a run's summary; older runs only recorded what their method looks at."""
    seen = summary.get("exposure")
    return str(summary["sees"]) if seen is None else sees(seen)


def _what(seen: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]) -> str:
    """Which arrays with which layers, of which clients, and when."""
    alike: dict[tuple[int, ...], dict[tuple[str, ...], list[str]]] = {}
    for name, array in arrays.items():
        by_layers = alike.setdefault((array["clients"], array["rounds"], array["first"]), {})
        by_layers.setdefault(tuple(array["layers"]), []).append(name)
    texts = []
    for (clients, rounds, first), names in alike.items():
        titles = [_and(_titles(n)) + _which(of, seen["layers"]) for of, n in names.items() if of]
        what = _and([*titles, *_titles(names.get((), []))])
        share = f" of {seen['clients']}" if clients < seen["clients"] else ""
        every = clients == seen["clients"]
        whose = f"every client's {what}" if every else f"the {what} of {_clients(clients, share)}"
        texts.append(f"{whose} {_when(rounds, first)}")
    return _and(texts)


# The words for arrays that many methods send; other names are quoted.
_TITLES = {
    "model": "model",
    "scored": "longer-trained model",
    "scores": "validation losses",
}
# What a probe asks for on both halves of a client's data, by the second word of the arrays' names.
_HALVES = {
    "": "models trained on two halves of its data",
    "gradient": "gradients on two halves of its data",
    "labels": "label frequencies in two halves of its data",
    "data": "input subspaces of two halves of its data",
}


def _titles(names: Sequence[str]) -> list[str]:
    """The names of arrays as used in a sentence.

    >>> _titles(["first", "second", "model"]), _titles(["first"])
    (['models trained on two halves of its data', 'model'], ["'first'"])
    >>> _titles(["first labels", "second labels"])
    ['label frequencies in two halves of its data']
    """
    titles = []
    for word, title in _HALVES.items():
        pair = [f"{which} {word}".strip() for which in ("first", "second")]
        if set(pair) <= set(names):
            titles.append(title)
            names = [n for n in names if n not in pair]
    return titles + [_TITLES.get(name, f"'{name}'") for name in names]


def _which(layers: Sequence[str], of: Sequence[str]) -> str:
    """Layers in brackets: their number if these are all, their names if they are few."""
    if not layers:
        return ""
    if set(layers) == set(of) and len(of) > 1:
        return f" (all {len(of)} layers)"
    if len(layers) == 1:
        return f" (layer {layers[0]})"
    names = f": {', '.join(layers)}" if len(layers) <= 3 else ""
    return f" ({len(layers)}{f' of {len(of)}' if of else ''} layers{names})"


def _of_sums(seen: Mapping[str, Any]) -> list[str]:
    """Sentences about the sums, unless the server has seen their terms anyway."""
    texts: list[str] = []
    single = seen["single"]
    for protection, of in seen["sums"].items():
        if protection == PLAIN and {AVERAGED, CENTRAL_NOISE, PLAIN} & set(single):
            continue
        low, high = of["smallest"], of["largest"]
        size = f"{low} clients" if low == high else f"{low} to {high} clients"
        what = {PLAIN: "unprotected sums", SECURE_NOISED: "noised sums"}.get(protection, "sums")
        begin = "Otherwise the server" if single or texts else "The server"
        texts.append(f"{begin} saw only {what} of {size}, {_when(of['rounds'], of['first'])}.")
    return texts


def _of_pairs(seen: Mapping[str, Any]) -> list[str]:
    """A sentence about pairs of sums that differ in few clients, with the worst pair."""
    near = seen["near"]
    if not near["count"]:
        return []
    alone = near["by_difference"].get("1", 0) == near["count"]
    by = "a single client" if alone else f"fewer than {near['least']} clients"
    first = near["examples"][0]
    one, other = first["rounds"]
    where = f"both in round {one}" if one == other else f"rounds {one} and {other}"
    clients = first["clients"]
    who = f"client{'s' * (len(clients) > 1)} {_and(map(str, clients))}"
    sent = "that client sent" if len(clients) == 1 else "those clients sent"
    exact = one == other and len(clients) == 1 and SECURE_NOISED not in seen["sums"]
    tells = "is" if exact else "narrows down"
    count = near["count"]
    pairs = "1 pair of sums differs" if count == 1 else f"{count} pairs of sums differ"
    return [f"{pairs} by {by} ({where}: {who}): the difference {tells} what {sent}."]


def _when(rounds: int, first: int) -> str:
    """The rounds in words; round 0 is before the first.

    >>> _when(1, 0), _when(1, 3), _when(2, 0), _when(4, 1)
    ('before round 1', 'once, in round 3', 'before round 1 and in 1 round', 'in 4 rounds')
    """
    if rounds == 1:
        return f"once, in round {first}" if first else "before round 1"
    if first:
        return f"in {rounds} rounds"
    return f"before round 1 and in {rounds - 1} round{'s' * (rounds > 2)}"


def _clients(clients: int, share: str) -> str:
    return f"{clients}{share} client{'s' * (clients > 1 or bool(share))}"


def _and(words: Iterable[str]) -> str:
    """Join words by commas and "and".

    >>> _and(["a"]), _and(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
