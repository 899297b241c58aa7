"""The exposure ledger: whose vectors reached the server by themselves, and which sums it learned.

It is about what reached the server, whatever the method looked at: without secure aggregation each
reply does, even if only its mean is used. Rounds are numbered as in the events, 0 being before the
first. What an abandoned round showed was seen, and stays; what was seen between the last
checkpoint and a crash is not in it.
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
LOCAL_NOISE = "local noise"  # the client added it
AVERAGED = "none, averaged on arrival"  # the method used only the mean
CENTRAL_NOISE = "central noise"  # the server added it to what it released
OF_ONE_ALONE = "none, a mean of one"  # such a mean is that client's vector
SECURE = "secure"
SECURE_NOISED = "secure, noised"
OF_ONE = (PLAIN, OF_ONE_ALONE, CONSENT, LOCAL_NOISE, AVERAGED, CENTRAL_NOISE)
OF_SUMS = (PLAIN, SECURE, SECURE_NOISED)

EXAMPLES = 5  # pairs of sums that a summary names
_PAIRS = 1000  # that are kept; all are counted

Arrays = Mapping[str, Iterable[str]]  # array -> its layers, none for a plain tensor
_Parts = frozenset[tuple[str, str]]  # array and layer


@dataclass(frozen=True)
class Near:
    """Two sums of nearly the same clients; ``clients`` are those in one of them only."""

    task: str
    rounds: tuple[int, int]
    slots: tuple[Slot, Slot]
    clients: tuple[ClientId, ...]


@dataclass(slots=True)
class _Span:
    """In how many rounds, the first and the last of them. Rounds never go back."""

    rounds: int = 0
    first: int = 0
    last: int = 0

    @property
    def span(self) -> tuple[int, int, int]:
        """The three numbers."""
        return self.rounds, self.first, self.last

    def note(self, round: int) -> bool:
        """Count a round; false if it was counted already."""
        if self.rounds and round == self.last:
            return False
        self.first = self.first if self.rounds else round
        self.rounds, self.last = self.rounds + 1, round
        return True


@dataclass(slots=True)
class _Client(_Span):
    """When one client's array was seen, and in how many rounds with which set of layers."""

    now: int = 0  # the set of the last round
    sets: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Array(_Span):
    """When an array was seen of anybody, and of whom."""

    clients: dict[ClientId, _Client] = field(default_factory=dict)


@dataclass(slots=True)
class _Sums(_Span):
    """How many sums of one protection, and of how many clients."""

    count: int = 0
    smallest: int = 0
    largest: int = 0

    def add(self, round: int, clients: int) -> None:
        self.note(round)
        self.smallest = min(self.smallest, clients) if self.count else clients
        self.largest, self.count = max(self.largest, clients), self.count + 1


@dataclass
class _Held:
    """The sums of one task and the same parts in one round, found by client."""

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
        """Whether a sum of the same clients is there."""
        return clients in self._known

    def near(
        self, clients: frozenset[ClientId], least: int
    ) -> list[tuple[Slot, frozenset[ClientId]]]:
        """Sums that have somebody in common with these clients, and few not: slot, who those are.

        It takes as long as there are clients, however many sums there are without them.
        """
        common = Counter(i for c in clients for i in self._of.get(c, ()))
        found = []
        for i, shared in sorted(common.items()):
            slot, others = self.sums[i]
            if 0 < len(clients) + len(others) - 2 * shared < least:
                found.append((slot, clients ^ others))
        return found


@dataclass
class Exposure:
    """What the server came to see.

    ``layers`` are all that the model shares, and ``members`` how many clients there are: with them
    it can say "all layers" and "every client". Sums whose clients differ by fewer than ``least``
    are noted as near; ``reveals`` is what the user let through, as in "final-layer".
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

    def begin(self, round: int) -> None:
        """Another round."""
        self.round = round

    def abandon(self) -> None:
        """The present round came to nothing; what it showed was seen all the same, and stays."""
        self.abandoned += self._latest == self.round

    def single(self, client: ClientId, round: int, arrays: Arrays, protection: str) -> None:
        """Vectors of this client alone reached the server."""
        if protection not in OF_ONE:
            raise CoterieError(unknown("protection of a client's vector", protection, OF_ONE))
        if not arrays:
            return
        self._latest = round
        self._spans.setdefault(protection, _Span()).note(round)
        for name, layers in arrays.items():
            array = self._seen.setdefault((name, protection), _Array())
            array.note(round)
            seen, found = array.clients.setdefault(client, _Client()), self._number(tuple(layers))
            if not seen.note(round):  # once more in this round: it is one set of layers
                seen.sets[seen.now] -= 1
                found = self._union(seen.now, found)
            seen.now = found
            seen.sets[found] = seen.sets.get(found, 0) + 1

    def sum(
        self,
        round: int,
        task: str,
        slot: Slot,
        clients: Collection[ClientId],
        arrays: Arrays,
        protection: str,
    ) -> None:
        """A sum over these clients was learned, and nothing finer; a sum of one is its vector."""
        if protection not in OF_SUMS:
            raise CoterieError(unknown("protection of a sum", protection, OF_SUMS))
        people = frozenset(clients)
        if not people or not arrays:
            return
        self._latest, layers = round, {name: tuple(of) for name, of in arrays.items()}
        if len(people) == 1:
            bare = LOCAL_NOISE if protection == SECURE_NOISED else PLAIN
            self.single(next(iter(people)), round, layers, bare)
        else:
            self._sums.setdefault(protection, _Sums()).add(round, len(people))
        parts = frozenset((name, each) for name, of in layers.items() for each in of or ("",))
        self._compare(round, task, slot, people, parts)

    def _compare(
        self, round: int, task: str, slot: Slot, people: frozenset[ClientId], parts: _Parts
    ) -> None:
        """Note the sums that this one can be subtracted from, and keep it for those to come."""
        own = self._held.setdefault(task, {}).setdefault(parts, [])
        if not own or own[-1].round != round:
            own.append(_Held(round, parts))
            del own[:-2]
        if own[-1].has(people):
            return  # it shows nothing new
        for held in self._before(task, round, parts):
            for other, clients in held.near(people, self.least):
                pair = Near(task, (held.round, round), (other, slot), tuple(sorted(clients)))
                self._counts[len(clients)] += 1
                if len(self._near) < _PAIRS:
                    self._near.append(pair)
        own[-1].add(slot, people)

    def _before(self, task: str, round: int, parts: _Parts) -> list[_Held]:
        """This round's sums, and for each part those of the last earlier round that had it."""
        every = [held for kept in self._held[task].values() for held in kept]
        every.sort(key=lambda held: held.round)
        last = {p: held.round for held in every if held.round < round for p in held.parts & parts}
        return [
            held
            for held in every
            if any(held.round >= last.get(p, held.round) for p in held.parts & parts)
        ]

    def _number(self, layers: tuple[str, ...]) -> int:
        """Each set of layers is kept once, under its number."""
        found = self._numbers.get(layers)
        if found is None:
            found = self._numbers[layers] = len(self._sets)
            self._sets.append(layers)
        return found

    def _union(self, one: int, other: int) -> int:
        if one == other:
            return one
        return self._number(tuple(dict.fromkeys(self._sets[one] + self._sets[other])))

    # --- what is told ---------------------------------------------------------------------------

    def near(self, least: int) -> list[Near]:
        """Pairs of sums whose clients differ, but by fewer than ``least``; at most a thousand.

        A sum is compared with those of its round and of the last round that had the same arrays:
        taking the difference of two leaves those clients that are in one of them only.
        """
        if least > self.least:
            raise CoterieError(f"pairs were noted that differ by fewer than {self.least}")
        return [pair for pair in self._near if len(pair.clients) < least]

    def rows(self) -> list[dict[str, Any]]:
        """As a table: a row for each client, array and protection.

        ``layer_rounds`` are in how many rounds each of its ``layers`` was seen, in their order.
        """
        found = []
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
                found.append(row)
        return sorted(found, key=lambda r: (r["client"], r["array"], r["protection"]))

    def summary(self) -> dict[str, Any]:
        """In short, as JSON."""
        single = {p: self._single(p, self._spans[p]) for p in OF_ONE if p in self._spans}
        revealed = single.get(CONSENT, {}).get("arrays", {})
        # First those that show a vector itself, then those that leave the fewest.
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
        arrays, everybody = {}, set[ClientId]()
        for (name, how), array in self._seen.items():
            if how == protection:
                everybody |= set(array.clients)
                arrays[name] = {
                    "layers": self._layers(array),
                    "clients": len(array.clients),
                    "rounds": array.rounds,
                    "first": array.first,
                    "last": array.last,
                }
        return {"clients": len(everybody), **asdict(span), "arrays": arrays}

    def _layers(self, array: _Array) -> list[str]:
        """All that were seen of anybody, in the model's order."""
        numbers = dict.fromkeys(n for seen in array.clients.values() for n in seen.sets)
        found = dict.fromkeys(layer for number in numbers for layer in self._sets[number])
        known = [layer for layer in self.layers if layer in found]
        return list(dict.fromkeys([*known, *found]))

    def sentences(self) -> list[str]:
        """What a run says of it at its end."""
        return sentences(self.summary())

    # --- what is kept ---------------------------------------------------------------------------

    def to_tree(self) -> dict[str, Tree]:
        """For a checkpoint."""
        return {
            "settings": (tuple(self.layers), self.members, self.least, self.reveals, self.secure),
            "abandoned": self.abandoned,
            "round": self.round,
            "latest": self._latest,
            "sets": list(self._sets),
            "seen": [
                (
                    *key,
                    array.span,
                    {c: (*s.span, s.now, dict(s.sets)) for c, s in array.clients.items()},
                )
                for key, array in self._seen.items()
            ],
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
        """From a checkpoint."""
        made = Exposure(*tree["settings"])
        made.round, made.abandoned = tree["round"], tree["abandoned"]
        made._latest = tree["latest"]
        for layers in tree["sets"]:
            made._number(tuple(layers))
        for name, protection, span, clients in tree["seen"]:
            array = made._seen[name, protection] = _Array(*span)
            for client, (*numbers, sets) in clients.items():
                array.clients[client] = _Client(*numbers)
                array.clients[client].sets.update(sets)
        made._spans.update({p: _Span(*s) for p, s in tree["spans"].items()})
        made._sums.update({p: _Sums(*s) for p, s in tree["sums"].items()})
        for task, round, parts, sums in tree["held"]:
            held = _Held(round, frozenset((name, layer) for name, layer in parts))
            for slot, clients in sums:
                held.add(slot, frozenset(clients))
            made._held.setdefault(task, {}).setdefault(held.parts, []).append(held)
        made._near.extend(Near(*near) for near in tree["near"])
        made._counts.update(tree["counts"])
        return made


# --- in words ------------------------------------------------------------------------------------

_SAID = {
    PLAIN: "The server looked at {what}, unprotected: the method needs each by itself.",
    OF_ONE_ALONE: "A mean of one client is what it sent: so the method saw {what}, unprotected.",
    CONSENT: "By consent{by} the server saw {what}.",
    LOCAL_NOISE: "The server saw {what}, with noise that each client had added.",
    AVERAGED: "The server received {what}, unprotected; the method used only their means.",
    CENTRAL_NOISE: "The server received {what}; only what it released from them was noised.",
}


def sentences(seen: Mapping[str, Any]) -> list[str]:
    """A summary in plain words.

    >>> ledger = Exposure(layers=["in", "out"], members=2)
    >>> for client in (0, 1):
    ...     ledger.single(client, 1, {"model": ["in", "out"]}, AVERAGED)
    >>> ledger.sentences()[0]
    "The server received every client's model (all 2 layers) once, in round 1, unprotected; the ..."
    """
    single, found = seen["single"], []
    by = next((f" (--reveal {each['by']})" for each in seen["revealed"] if each["by"]), "")
    for protection, words in _SAID.items():
        if protection in single:
            found.append(words.format(what=_what(seen, single[protection]["arrays"]), by=by))
    if AVERAGED in single and PLAIN not in single and OF_ONE_ALONE not in single:
        found[-1] += " --secure would show it sums alone."
    found += _of_sums(seen) + _of_pairs(seen)
    if not found and seen.get("secure"):
        return ["The server learned no sum: what it received was masked."]
    if not found:
        return ["Nothing left the clients."]
    if seen["abandoned"]:
        were = "One round was" if seen["abandoned"] == 1 else f"{seen['abandoned']} rounds were"
        found.append(f"{were} abandoned: what had arrived by then was seen all the same.")
    return found


def sees(seen: Mapping[str, Any]) -> str:
    """The most that the server saw, in a word.

    >>> sees(Exposure().summary())
    'nothing'
    """
    words = {PLAIN: "each", OF_ONE_ALONE: "each", CONSENT: "revealed", LOCAL_NOISE: "noised"}
    words |= {AVERAGED: "means", CENTRAL_NOISE: "means"}
    most = [words[p] for p in OF_ONE if p in seen["single"]]
    return [*most, *("sums" for _ in seen["sums"]), "nothing"][0]


def server_sees(summary: Mapping[str, Any]) -> str:
    """The same for a run's summary; an older run has only what its method looks at."""
    seen = summary.get("exposure")
    return str(summary["sees"]) if seen is None else sees(seen)


def _what(seen: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]) -> str:
    """Which arrays with which layers, of whom and when."""
    alike: dict[tuple[int, ...], dict[tuple[str, ...], list[str]]] = {}
    for name, array in arrays.items():
        who_and_when = alike.setdefault((array["clients"], array["rounds"], array["first"]), {})
        who_and_when.setdefault(tuple(array["layers"]), []).append(name)
    found = []
    for (clients, rounds, first), things in alike.items():
        titles = [_and(_titles(n)) + _which(of, seen["layers"]) for of, n in things.items() if of]
        what = _and([*titles, *_titles(things.get((), []))])
        share = f" of {seen['clients']}" if clients < seen["clients"] else ""
        everybody = clients == seen["clients"]
        whose = (
            f"every client's {what}" if everybody else f"the {what} of {_people(clients, share)}"
        )
        found.append(f"{whose} {_when(rounds, first)}")
    return _and(found)


# What arrays that many methods have in common are called; others stand in quotes.
_TITLES = {
    "model": "model",
    "scored": "longer-trained model",
    "scores": "validation losses",
}
# What a probe asks of both halves of a client's data, by the second word of the arrays' names.
_HALVES = {
    "": "models trained on two halves of its data",
    "gradient": "gradients on two halves of its data",
    "labels": "label frequencies in two halves of its data",
    "data": "input subspaces of two halves of its data",
}


def _titles(names: Sequence[str]) -> list[str]:
    """Arrays as they are called in a sentence.

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
    """Layers in brackets: by number if it is all, by name if they are few."""
    if not layers:
        return ""
    if set(layers) == set(of) and len(of) > 1:
        return f" (all {len(of)} layers)"
    if len(layers) == 1:
        return f" (layer {layers[0]})"
    names = f": {', '.join(layers)}" if len(layers) <= 3 else ""
    return f" ({len(layers)}{f' of {len(of)}' if of else ''} layers{names})"


def _of_sums(seen: Mapping[str, Any]) -> list[str]:
    """The sums, unless they are of replies that had been seen before."""
    found: list[str] = []
    single = seen["single"]
    for protection, of in seen["sums"].items():
        if protection == PLAIN and {AVERAGED, CENTRAL_NOISE, PLAIN} & set(single):
            continue
        low, high = of["smallest"], of["largest"]
        size = f"{low} clients" if low == high else f"{low} to {high} clients"
        what = {PLAIN: "unprotected sums", SECURE_NOISED: "noised sums"}.get(protection, "sums")
        begin = "Otherwise the server" if single or found else "The server"
        found.append(f"{begin} saw {what} only, of {size}, {_when(of['rounds'], of['first'])}.")
    return found


def _of_pairs(seen: Mapping[str, Any]) -> list[str]:
    """Sums that leave few clients when one is subtracted from another; the worst is named."""
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
    """In which rounds; 0 is before the first.

    >>> _when(1, 0), _when(1, 3), _when(2, 0), _when(4, 1)
    ('before round 1', 'once, in round 3', 'before round 1 and in 1 round', 'in 4 rounds')
    """
    if rounds == 1:
        return f"once, in round {first}" if first else "before round 1"
    if first:
        return f"in {rounds} rounds"
    return f"before round 1 and in {rounds - 1} round{'s' * (rounds > 2)}"


def _people(clients: int, share: str) -> str:
    return f"{clients}{share} client{'s' * (clients > 1 or bool(share))}"


def _and(words: Iterable[str]) -> str:
    """In a row.

    >>> _and(["a"]), _and(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
