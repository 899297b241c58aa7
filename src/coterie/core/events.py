"""What a run writes down as it goes on, and at its end: the types of its files' contents.

Each field is declared here, once, with what it means: what is written is checked against these
types, whoever reads a run directory reads them, and docs/reference/run-directory.md is made from
them. They are tables as JSON has them, so that a file, ``Result.history`` and what trackers are
told are the same thing. A number that is not finite is written as null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict, get_type_hints, is_typeddict

from coterie.errors import RunDirError, unknown

LARGEST = 1e300  # beyond that nobody counted; sums and products of such numbers overflow

Count = Annotated[int, Field(ge=0, lt=2**53)]
Finite = Annotated[float, Field(gt=-LARGEST, lt=LARGEST)]
Number = Finite | None
Group = int | str | None
Headline = Literal["received", "adapted"]
Pair = Annotated[list[Finite], Field(min_length=2, max_length=2)]
ById = Annotated[str, Field(pattern=r"^\d+$")]  # a client's number, as a key
Scores = Mapping[str, Number]

_CLOSED = ConfigDict(extra="forbid", strict=True)
_OPEN = ConfigDict(extra="allow", strict=True)


@with_config(_CLOSED)
class Way(TypedDict):
    """Bytes both ways."""

    down: Annotated[Count, "to clients"]
    up: Annotated[Count, "from clients"]


@with_config(_CLOSED)
class Noise(TypedDict):
    """What a run's noise has come to after a round."""

    epsilon: Annotated[Number, "so far, by Rényi divergences"]
    delta: Annotated[Number, "δ"]
    releases: Annotated[Number, "so far"]
    clip: Annotated[Number, "the bound for the next round"]


@with_config(_CLOSED)
class Event(TypedDict, total=False):
    """A line of ``events.jsonl``: a round, unless its field ``event`` says otherwise.

    What a line of each kind must have stands in ``KINDS``.
    """

    round: Annotated[Count, "the round, from 1"]
    event: Annotated[str, "what it is, if it is no round"]
    cohort: Annotated[list[Count], "the clients that took part"]
    clients: Annotated[list[Count], "the clients that joined"]
    unanswered: Annotated[list[Count], "those who did not answer, and stay outside"]
    groups: Annotated[
        list[Group],
        "each client's group after the round, in client order; `null` if it has none, as those "
        "held out",
    ]
    epochs: Annotated[Count, "`run.admit_epochs`"]
    bytes: Annotated[Way, "`down` and `up` of this round, as the method costs"]
    total_bytes: Annotated[Way, "the same since the start"]
    wasted: Annotated[
        Way,
        "the same, of this round, of reports that did not count: lost, late, or of an abandoned "
        "round",
    ]
    total_wasted: Annotated[Way, "the same since the start"]
    kinds: Annotated[
        dict[str, Pair],
        "`[down, up]` of this round by [kind](wire.md#what-is-counted-where)",
    ]
    client_bytes: Annotated[dict[ById, Pair], "`[down, up]` of this round by client"]
    lost: Annotated[Count, "replies that never came (also from clients that were off)"]
    late: Annotated[Count, "replies that came too late"]
    abandoned: Annotated[
        str,
        "why the round was abandoned, if so; it then changed nothing, and has scores only if it "
        "is the last",
    ]
    clock: Annotated[
        dict[str, Number],
        "with a clock: `computation`, `communication` and `waiting` seconds of this round, their "
        "`total` since the start, and each since the start (`total_computation`, …)",
    ]
    exchanges: Annotated[Count, "how many times clients were asked in this round, scoring included"]
    spared: Annotated[
        Count,
        "real federations: bytes of arrays that went as a digest, for the client had them from "
        "this round",
    ]
    rejected: Annotated[
        dict[ById, str],
        "clients whose answer was not used, and why: outliers (`run.outliers`); in real "
        "federations also what is malformed. Only if there are any",
    ]
    received: Annotated[
        Scores,
        "scores of the received model, in rounds that are scored; they may come later, in an "
        "event `scores`",
    ]
    adapted: Annotated[Scores, "scores of the adapted model, in rounds that are scored so"]
    client_scores: Annotated[
        dict[str, list[Number]],
        "where there are scores: the headline score of each client, in client order, `null` if it "
        "has none; a list `received`, and one `adapted` if there are such",
    ]
    failed_scores: Annotated[
        dict[ById, str], "why clients could not score when their scores came later, by client"
    ]
    seconds: Annotated[
        dict[str, Finite],
        "`train` and `score`; scores that ride on a later order count there, as `train`",
    ]
    privacy: Annotated[
        Noise,
        "with noise (but NbAFL's): `epsilon` so far by Rényi divergences, `delta`, `releases` so "
        "far, `clip`, the bound for the next round",
    ]
    withheld: Annotated[
        dict[str, str],
        "with `--secure`: why groups have no sum in this round, by slot; only if there are any",
    ]
    notes: Annotated[
        dict[str, Any], "what the method has to show of the round; only if it has anything"
    ]


# Of each kind of event: when there is one, what it must have, and what it may have.
ROUND, INIT, SCORES, ARRIVAL, ADMISSION = "round", "init", "scores", "arrival", "admission"
CLOSING = "closing"  # what is told of the closing scores; it is not written
_COST = ("total_bytes", "wasted", "total_wasted", "kinds", "client_bytes", "lost", "late")


@dataclass(frozen=True)
class Kind:
    """When there is an event of a kind, what it must have, and what it may have."""

    when: str
    must: tuple[str, ...]
    may: tuple[str, ...]


KINDS: dict[str, Kind] = {
    ROUND: Kind(
        "after every round",
        ("cohort", "groups", "bytes", *_COST, "exchanges", "seconds"),
        (
            *("abandoned", "clock", "spared", "rejected", "received", "adapted", "client_scores"),
            *("failed_scores", "privacy", "withheld", "notes"),
        ),
    ),
    INIT: Kind(
        "before the first round, if the method asked clients for anything or has anything "
        "to show; `round` is 0",
        ("groups", "bytes", "wasted", "kinds", "seconds"),
        ("clock", "rejected", "notes"),
    ),
    SCORES: Kind(
        "after the round that it names, if its scores rode on the next round's orders; if "
        "there are two of a round, the last counts",
        (),
        ("received", "client_scores", "failed_scores"),
    ),
    ARRIVAL: Kind(
        "real federations: before the round that it names, if clients came late and were "
        "admitted; `groups` are theirs",
        ("clients", "groups"),
        ("rejected", "notes"),
    ),
    ADMISSION: Kind(
        "after the last round, if clients were held out; `round` is the last one, the rest "
        "as `newcomers` in `result.json`",
        ("clients", "unanswered", "groups", "epochs", "received", "adapted", "bytes"),
        ("rejected", "notes"),
    ),
}


# --- the end ------------------------------------------------------------------------------------


@with_config(_CLOSED)
class Newcomers(TypedDict, total=False):
    """What came of clients that were held out."""

    clients: Annotated[list[Count], "those who joined"]
    unanswered: Annotated[list[Count], "those who did not answer, and stay outside"]
    groups: Annotated[list[Group], "the groups of `clients`, in the same order"]
    epochs: Annotated[Count, "`run.admit_epochs`"]
    received: Annotated[Scores, "their scores as they came; empty if none has test data"]
    adapted: Annotated[Scores, "their scores after that many epochs"]
    bytes: Annotated[Way, "`down` and `up` of finding their places"]
    rejected: Annotated[dict[ById, str], "whose answer was not used, and why"]


@with_config(_CLOSED)
class Best(TypedDict, total=False):
    """The best round on validation data; empty if no round was looked at so."""

    round: Annotated[Count, "the round"]
    val: Annotated[Number, "its score on validation data"]
    received: Annotated[Scores, "its scores"]


@with_config(_CLOSED)
class AllBytes(Way, total=False):
    """Bytes of a whole run."""

    unmetered: Annotated[Way, "scoring and work that a real client would do by itself"]
    wasted: Annotated[Way, "of reports that did not count"]
    kinds: Annotated[dict[str, Way], "by kind"]


@with_config(_CLOSED)
class Reached(TypedDict):
    """What it took to reach a target."""

    target: Annotated[Number, "the score"]
    round: Annotated[Count, "the first round that reached it"]
    bytes: Annotated[Way, "until then"]
    seconds: NotRequired[Annotated[Number, "of the clock, until then"]]
    clients: Annotated[Count, "how many there are"]


@with_config(_OPEN)
class Spending(TypedDict, total=False):
    """What a run's privacy came to, and how."""

    epsilon: Annotated[Number, "what was spent"]
    delta: Annotated[Number, "δ"]
    budget: Annotated[Number, "`privacy.epsilon`; null without"]


@with_config(_CLOSED)
class Summary(TypedDict, total=False):
    """What a run comes to: the content of ``result.json``, as far as it can be read."""

    method: Annotated[str, "the method"]
    rounds: Annotated[Count, "how many were done"]
    stopped: Annotated[str, "why it ended early, else empty"]
    judged_by: Annotated[str, "`accuracy` or `r2`"]
    headline: Annotated[Headline, "the score that the method is judged by"]
    received: Annotated[Scores, "scores of the received model after the last round"]
    adapted: Annotated[Scores, "scores of the adapted model after the last round"]
    best_on_validation: Annotated[
        Best,
        "the `round` that was best on validation data, its score there (`val`), and its "
        "`received` scores",
    ]
    bytes: Annotated[
        AllBytes,
        "`down`, `up`; `apart`: scoring and work that a real client would do by itself; `wasted`; "
        "`kinds`",
    ]
    groups: Annotated[Count, "how many there are"]
    sees: Annotated[str, "the most that the method looks at"]
    seconds: Annotated[Number, "of all rounds, scoring included"]
    train_seconds: Annotated[Number, "of the rounds without scoring"]
    lost: Annotated[Count, "replies that never came"]
    late: Annotated[Count, "replies that came too late"]
    abandoned: Annotated[Count, "rounds that were abandoned"]
    warnings: Annotated[list[str], "sentences"]
    grouping: Annotated[dict[str, Any], "if the method says how it came to its groups: below"]
    exposure: Annotated[dict[str, Any], "what reached the server: below"]
    privacy: Annotated[Spending, "if it was asked for: below"]
    clock: Annotated[dict[str, Number], "seconds, if there was a clock"]
    to_target: Annotated[
        Reached | None,
        "if `evaluation.target` was set: `target`, `round`, `bytes`, `seconds`, `clients`; "
        "null if it was not reached",
    ]
    to_target_adapted: Annotated[
        Reached | None,
        "the same for adapted scores, if they were taken along the way",
    ]
    newcomers: Annotated[Newcomers, "if clients were held out: below"]
    alone: Annotated[Scores, "scores of clients that trained alone, if asked for"]
    kept: Annotated[list[Count], "real federations: the clients that have their model"]
    scenario: Annotated[dict[str, Any], "with `--scenario`: below"]


# What a summary has only if there is anything to say.
SUMMARY_MAY = (
    "grouping",
    "privacy",
    "clock",
    "to_target",
    "to_target_adapted",
    "newcomers",
    "alone",
    "kept",
    "scenario",
)


class Data(TypedDict, total=False):
    """What is known of clients' data: the content of ``data.json``."""

    names: list[Group]
    groups: list[Group] | None
    classes: list[Group] | None
    labels: list[list[Finite]]
    quartiles: list[list[Finite] | None]


class Session(TypedDict, total=False):
    """A process that worked on a run: a line of ``sessions.jsonl``."""

    at: str
    argv: list[str] | None
    folder: str
    rounds: Count
    done: Count
    engine: str
    workers: Count | None
    headline: Headline
    model_bytes: Count
    batch_clients: Count
    versions: dict[str, str]
    system: str


# --- what is written is checked, what is read is mended ------------------------------------------


def check_event(text: str) -> None:
    """Refuse a line of ``events.jsonl`` that is none, with a RunDirError.

    >>> check_event('{"round": 1, "event": "scores", "received": {"loss": "low"}}')
    Traceback (most recent call last):
    coterie.errors.RunDirError: an event cannot be written: received.loss = 'low': must be a ...
    """
    event = _check(Event, text, "an event")
    known = KINDS.get(event.get("event", ROUND))
    if known is None:
        raise RunDirError(f"an event cannot be written: {unknown('kind', event['event'], KINDS)}")
    has = event.keys() - {"event"}
    must = {"round", *known.must}
    for wrong, how in ((must - has, "lacks"), (has - must - {*known.may}, "has")):
        if wrong:
            name = event.get("event", ROUND)
            raise RunDirError(f"an event cannot be written: '{name}' {how} {min(wrong)}")


def check_summary(text: str) -> None:
    """Refuse the content of a ``result.json`` that is none, with a RunDirError."""
    has = _check(Summary, text, "a result").keys()
    if lacks := fields_of(Summary).keys() - has - {*SUMMARY_MAY}:
        raise RunDirError(f"a result cannot be written: it lacks {min(lacks)}")


def _check(kind: Any, text: str, what: str) -> Any:
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        why = first["msg"].lower().replace("input should be", "must be")
        raise RunDirError(f"{what} cannot be written: {name} = {first['input']!r}: {why}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def fields_of(kind: Any) -> Mapping[str, Any]:
    """The fields of a table, and what they hold."""
    return get_type_hints(kind, include_extras=True)


def meaning(annotation: Any) -> str:
    """What a field means, in Markdown."""
    while get_origin(annotation) in (Required, NotRequired):
        (annotation,) = get_args(annotation)
    return next((m for m in getattr(annotation, "__metadata__", ()) if isinstance(m, str)), "")


def is_number(value: Any) -> bool:
    """A finite number, and no truth value.

    >>> [is_number(v) for v in (1, 0.5, True, "1", float("nan"), 10**400)]
    [True, True, False, False, False, False]
    """
    return type(value) in (float, int) and -LARGEST < value < LARGEST


def is_count(value: Any) -> bool:
    """A whole number from 0 on that counts something."""
    return is_number(value) and isinstance(value, int) and 0 <= value < 2**53


def mended(tree: Mapping[str, Any], fields: Mapping[str, Any], bad: list[str]) -> dict[str, Any]:
    """A table without what is not as it should be; the names of such fields are added to ``bad``.

    So nothing that comes after has to expect text where a number should be. In a list, null takes
    the place of what is dropped. Fields that are not known stay.

    >>> bad = []
    >>> mended({"lost": "x", "bytes": {"down": 3, "up": "?"}, "new": 1}, fields_of(Event), bad), bad
    ({'bytes': {'down': 3}, 'new': 1}, ['lost', 'bytes'])
    """
    found = {}
    for key, value in tree.items():
        kept, well = _mended(value, fields[key]) if key in fields else (value, True)
        if not well:
            bad.append(key)
        if kept is not _DROPPED:
            found[key] = kept
    return found


_DROPPED = object()


def _mended(value: Any, kind: Any) -> tuple[Any, bool]:
    """What is left of a value of this kind, and whether that is all of it."""
    kind = _bare(kind)
    try:  # nearly all values are as they should be
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return _without_bad(value, kind)
    return value, True


def _without_bad(value: Any, kind: Any) -> tuple[Any, bool]:
    """The same of a value that has something wrong, or that has fields which are not known."""
    if value is None:
        return _DROPPED, False
    if get_origin(kind) in (Union, UnionType) and len(get_args(kind)) == 2:  # or null
        (kind,) = set(get_args(kind)) - {NoneType}
    inner: Any = get_args(kind)
    if is_typeddict(kind) and isinstance(value, Mapping):
        bad = list[str]()
        return mended(value, fields_of(kind), bad), not bad
    if get_origin(kind) in (dict, Mapping) and isinstance(value, Mapping):
        names = {k: _mended(k, inner[0])[1] for k in value}
        pairs = {k: _mended(v, inner[1]) for k, v in value.items() if names[k]}
        kept = {k: v for k, (v, _) in pairs.items() if v is not _DROPPED}
        return kept, all(names.values()) and all(well for _, well in pairs.values())
    if get_origin(kind) is list and isinstance(value, list):
        parts = [_mended(v, inner[0]) for v in value]
        return [None if v is _DROPPED else v for v, _ in parts], all(well for _, well in parts)
    return _DROPPED, False


@cache
def _bare(kind: Any) -> Any:
    """A kind without its meaning, but with its bounds."""
    while get_origin(kind) in (Required, NotRequired):
        (kind,) = get_args(kind)
    if not meaning(kind):
        return kind
    plain, *more = get_args(kind)
    bounds = [m for m in more if not isinstance(m, str)]
    return Annotated[(plain, *bounds)] if bounds else plain
