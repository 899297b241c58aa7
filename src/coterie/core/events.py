"""Events and results: the types of what a run writes during its rounds and at its end.

Every field is declared here, once, with its meaning. What a run writes is checked against these
types, readers of run directories rely on them, and docs/reference/run-directory.md is made from
them. They are JSON objects, so that the files, ``Result.history`` and the input of trackers all
have the same form. Numbers that are not finite are written as null.
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

LARGEST = 1e300  # larger numbers are not plausible, and their sums and products overflow

NonNegativeInt = Annotated[int, Field(ge=0, lt=2**53)]
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
    """Bytes in both directions."""

    down: Annotated[NonNegativeInt, "to clients"]
    up: Annotated[NonNegativeInt, "from clients"]


@with_config(_CLOSED)
class Noise(TypedDict):
    """The privacy spent by a run with noise, after a round."""

    epsilon: Annotated[Number, "so far, by Rényi divergences"]
    delta: Annotated[Number, "δ"]
    releases: Annotated[Number, "so far"]
    clip: Annotated[Number, "the bound for the next round"]


@with_config(_CLOSED)
class Event(TypedDict, total=False):
    """A line of ``events.jsonl``: a round, unless its field ``event`` says otherwise.

    ``KINDS`` lists the fields of each kind of event.
    """

    round: Annotated[NonNegativeInt, "the round, from 1"]
    event: Annotated[str, "the kind of the event, if it is not a round"]
    cohort: Annotated[list[NonNegativeInt], "the clients that took part"]
    clients: Annotated[list[NonNegativeInt], "the clients that joined"]
    unanswered: Annotated[list[NonNegativeInt], "the clients that did not answer, and stay outside"]
    groups: Annotated[
        list[Group],
        "each client's group after the round, in client order; `null` if it has none, such as "
        "clients that are held out",
    ]
    epochs: Annotated[NonNegativeInt, "`run.admit_epochs`"]
    bytes: Annotated[Way, "`down` and `up` of this round, for the method's own messages"]
    total_bytes: Annotated[Way, "the same since the start"]
    wasted: Annotated[
        Way,
        "`down` and `up` of this round, for replies that did not count: lost, late, or of an "
        "abandoned round",
    ]
    total_wasted: Annotated[Way, "the same since the start"]
    kinds: Annotated[
        dict[str, Pair],
        "`[down, up]` of this round by [kind](wire.md#what-is-counted-where)",
    ]
    client_bytes: Annotated[dict[ById, Pair], "`[down, up]` of this round by client"]
    lost: Annotated[
        NonNegativeInt, "lost replies (including those of clients that were not available)"
    ]
    late: Annotated[NonNegativeInt, "replies that arrived too late"]
    abandoned: Annotated[
        str,
        "why the round was abandoned, if it was; it then changed nothing, and has scores only if "
        "it is the last round",
    ]
    clock: Annotated[
        dict[str, Number],
        "with a clock: `computation`, `communication` and `waiting` seconds of this round, their "
        "`total` since the start, and each since the start (`total_computation`, …)",
    ]
    exchanges: Annotated[
        NonNegativeInt, "the number of exchanges with clients in this round, including scoring"
    ]
    spared: Annotated[
        NonNegativeInt,
        "real federations: bytes of arrays that were sent as a digest, because the client already "
        "had them in this round",
    ]
    rejected: Annotated[
        dict[ById, str],
        "clients whose replies were not used, and why: outliers (`run.outliers`); in real "
        "federations also malformed replies. Only if there are any",
    ]
    received: Annotated[
        Scores,
        "scores of the received model, in rounds that are scored; they may follow later, in an "
        "event `scores`",
    ]
    adapted: Annotated[Scores, "scores of the adapted model, in rounds for which they are computed"]
    client_scores: Annotated[
        dict[str, list[Number]],
        "in rounds with scores: the headline score of each client, in client order, `null` if it "
        "has none; a list `received`, and a list `adapted` if there are adapted scores",
    ]
    failed_scores: Annotated[
        dict[ById, str], "why clients could not compute scores that were to follow later, by client"
    ]
    seconds: Annotated[
        dict[str, Finite],
        "`train` and `score`; scores piggybacked on a later order count as `train` of that round",
    ]
    privacy: Annotated[
        Noise,
        "with noise (except NbAFL's): `epsilon` so far by Rényi divergences, `delta`, `releases` "
        "so far, and `clip`, the bound for the next round",
    ]
    withheld: Annotated[
        dict[str, str],
        "with `--secure`: why groups have no sum in this round, by slot; only if there are any",
    ]
    notes: Annotated[dict[str, Any], "the method's notes about the round; only if there are any"]


# The kinds of events.
ROUND, INIT, SCORES, ARRIVAL, ADMISSION = "round", "init", "scores", "arrival", "admission"
CLOSING = "closing"  # the final scores, for trackers; not written
_COST = ("total_bytes", "wasted", "total_wasted", "kinds", "client_bytes", "lost", "late")


@dataclass(frozen=True)
class EventKind:
    """When events of a kind are written, and their required and optional fields."""

    when: str
    must: tuple[str, ...]
    may: tuple[str, ...]


KINDS: dict[str, EventKind] = {
    ROUND: EventKind(
        "after every round",
        ("cohort", "groups", "bytes", *_COST, "exchanges", "seconds"),
        (
            *("abandoned", "clock", "spared", "rejected", "received", "adapted", "client_scores"),
            *("failed_scores", "privacy", "withheld", "notes"),
        ),
    ),
    INIT: EventKind(
        "before the first round, if the method exchanged messages with clients or has notes; "
        "`round` is 0",
        ("groups", "bytes", "wasted", "kinds", "seconds"),
        ("clock", "rejected", "notes"),
    ),
    SCORES: EventKind(
        "after the round that it names, if its scores were piggybacked on the next round's orders; "
        "if there are several for a round, the last one counts",
        (),
        ("received", "client_scores", "failed_scores"),
    ),
    ARRIVAL: EventKind(
        "real federations: before the round that it names, if clients joined late and were "
        "admitted; `groups` are those of these clients",
        ("clients", "groups"),
        ("rejected", "notes"),
    ),
    ADMISSION: EventKind(
        "after the last round, if clients were held out; `round` is the last one, and the other "
        "fields are as in `newcomers` of `result.json`",
        ("clients", "unanswered", "groups", "epochs", "received", "adapted", "bytes"),
        ("rejected", "notes"),
    ),
}


# --- the end ------------------------------------------------------------------------------------


@with_config(_CLOSED)
class Newcomers(TypedDict, total=False):
    """The results of clients that were held out."""

    clients: Annotated[list[NonNegativeInt], "the clients that joined"]
    unanswered: Annotated[list[NonNegativeInt], "the clients that did not answer, and stay outside"]
    groups: Annotated[list[Group], "the groups of `clients`, in the same order"]
    epochs: Annotated[NonNegativeInt, "`run.admit_epochs`"]
    received: Annotated[Scores, "their scores with the received model; empty if none has test data"]
    adapted: Annotated[Scores, "their scores after that many epochs of adaptation"]
    bytes: Annotated[Way, "`down` and `up` of assigning them to groups"]
    rejected: Annotated[dict[ById, str], "the clients whose replies were not used, and why"]


@with_config(_CLOSED)
class Best(TypedDict, total=False):
    """The best round on validation data; empty if no round was scored on it."""

    round: Annotated[NonNegativeInt, "the round"]
    val: Annotated[Number, "its score on validation data"]
    received: Annotated[Scores, "its scores"]


@with_config(_CLOSED)
class AllBytes(Way, total=False):
    """Bytes of a whole run."""

    unmetered: Annotated[Way, "scoring and work that a real client would do by itself"]
    wasted: Annotated[Way, "of replies that did not count"]
    kinds: Annotated[dict[str, Way], "by kind"]


@with_config(_CLOSED)
class Reached(TypedDict):
    """The cost of reaching a target."""

    target: Annotated[Number, "the score"]
    round: Annotated[NonNegativeInt, "the first round that reached it"]
    bytes: Annotated[Way, "until then"]
    seconds: NotRequired[Annotated[Number, "of the clock, until then"]]
    clients: Annotated[NonNegativeInt, "the number of clients"]


@with_config(_OPEN)
class PrivacySpent(TypedDict, total=False):
    """The privacy spent by a run, and the mechanism."""

    epsilon: Annotated[Number, "what was spent"]
    delta: Annotated[Number, "δ"]
    budget: Annotated[Number, "`privacy.epsilon`; null without"]


@with_config(_CLOSED)
class Summary(TypedDict, total=False):
    """The result of a run: the content of ``result.json``."""

    method: Annotated[str, "the method"]
    rounds: Annotated[NonNegativeInt, "the number of completed rounds"]
    stopped: Annotated[str, "why the run ended early; empty if it did not"]
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
        "`down`, `up`; `unmetered`: scoring and work that a real client would do by itself; "
        "`wasted`; `kinds`",
    ]
    groups: Annotated[NonNegativeInt, "the number of groups"]
    sees: Annotated[str, "the most that the server sees of a client"]
    seconds: Annotated[Number, "of all rounds, including scoring"]
    train_seconds: Annotated[Number, "of the rounds without scoring"]
    lost: Annotated[NonNegativeInt, "lost replies"]
    late: Annotated[NonNegativeInt, "replies that arrived too late"]
    abandoned: Annotated[NonNegativeInt, "abandoned rounds"]
    warnings: Annotated[list[str], "sentences"]
    grouping: Annotated[dict[str, Any], "if the method explains its groups: below"]
    exposure: Annotated[dict[str, Any], "what reached the server: below"]
    privacy: Annotated[PrivacySpent, "with `[privacy]`: below"]
    clock: Annotated[dict[str, Number], "seconds, if there was a clock"]
    to_target: Annotated[
        Reached | None,
        "if `evaluation.target` was set: `target`, `round`, `bytes`, `seconds`, `clients`; "
        "null if it was not reached",
    ]
    to_target_adapted: Annotated[
        Reached | None,
        "the same for adapted scores, if they were computed during the run",
    ]
    newcomers: Annotated[Newcomers, "if clients were held out: below"]
    alone: Annotated[Scores, "scores of clients that trained alone, with `evaluation.alone`"]
    kept: Annotated[
        list[NonNegativeInt], "real federations: the clients that have kept their model"
    ]
    scenario: Annotated[dict[str, Any], "with `--scenario`: below"]


# The optional fields of a summary.
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
    """Statistics of the clients' data: the content of ``data.json``."""

    names: list[Group]
    groups: list[Group] | None
    classes: list[Group] | None
    labels: list[list[Finite]]
    quartiles: list[list[Finite] | None]


class SessionLine(TypedDict, total=False):
    """A process that worked on a run: a line of ``sessions.jsonl``."""

    at: str
    argv: list[str] | None
    folder: str
    rounds: NonNegativeInt
    done: NonNegativeInt
    engine: str
    workers: NonNegativeInt | None
    headline: Headline
    model_bytes: NonNegativeInt
    batch_clients: NonNegativeInt
    versions: dict[str, str]
    system: str


# --- checks of what is written, repairs of what is read ------------------------------------------


def check_event(text: str) -> None:
    """Raise a RunDirError if a text is not a valid line of ``events.jsonl``.

    >>> check_event('{"round": 1, "event": "scores", "received": {"loss": "low"}}')
    Traceback (most recent call last):
    coterie.errors.RunDirError: an event cannot be written: received.loss = 'low': must be a ...
    """
    event = _check(Event, text, "an event")
    known = KINDS.get(event.get("event", ROUND))
    if known is None:
        raise RunDirError(f"an event cannot be written: {unknown('kind', event['event'], KINDS)}")
    fields = event.keys() - {"event"}
    required = {"round", *known.must}
    for names, verb in ((required - fields, "lacks"), (fields - required - {*known.may}, "has")):
        if names:
            name = event.get("event", ROUND)
            raise RunDirError(f"an event cannot be written: '{name}' {verb} {min(names)}")


def check_summary(text: str) -> None:
    """Raise a RunDirError if a text is not the valid content of a ``result.json``."""
    fields = _check(Summary, text, "a result").keys()
    if missing := fields_of(Summary).keys() - fields - {*SUMMARY_MAY}:
        raise RunDirError(f"a result cannot be written: it lacks {min(missing)}")


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
    """The fields of a table with their types."""
    return get_type_hints(kind, include_extras=True)


def meaning(annotation: Any) -> str:
    """The meaning of a field, in Markdown."""
    while get_origin(annotation) in (Required, NotRequired):
        (annotation,) = get_args(annotation)
    return next((m for m in getattr(annotation, "__metadata__", ()) if isinstance(m, str)), "")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and not a Boolean.

    >>> [is_number(v) for v in (1, 0.5, True, "1", float("nan"), 10**400)]
    [True, True, False, False, False, False]
    """
    return type(value) in (float, int) and -LARGEST < value < LARGEST


def is_count(value: Any) -> bool:
    """Whether a value is a count: a whole number from 0."""
    return is_number(value) and isinstance(value, int) and 0 <= value < 2**53


def mended(tree: Mapping[str, Any], fields: Mapping[str, Any], bad: list[str]) -> dict[str, Any]:
    """Remove invalid values from a table; the names of their fields are added to ``bad``.

    Readers then need not expect, for example, text in place of a number. In lists, invalid values
    are replaced by null. Unknown fields are kept.

    >>> bad = []
    >>> mended({"lost": "x", "bytes": {"down": 3, "up": "?"}, "new": 1}, fields_of(Event), bad), bad
    ({'bytes': {'down': 3}, 'new': 1}, ['lost', 'bytes'])
    """
    result = {}
    for key, value in tree.items():
        rest, intact = _mended(value, fields[key]) if key in fields else (value, True)
        if not intact:
            bad.append(key)
        if rest is not _DROPPED:
            result[key] = rest
    return result


_DROPPED = object()


def _mended(value: Any, kind: Any) -> tuple[Any, bool]:
    """The valid part of a value of this type, and whether all of it is valid."""
    kind = _bare(kind)
    try:  # nearly all values are valid
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return _without_bad(value, kind)
    return value, True


def _without_bad(value: Any, kind: Any) -> tuple[Any, bool]:
    """The same for a value that is invalid or has unknown fields."""
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
        rest = {k: v for k, (v, _) in pairs.items() if v is not _DROPPED}
        return rest, all(names.values()) and all(intact for _, intact in pairs.values())
    if get_origin(kind) is list and isinstance(value, list):
        parts = [_mended(v, inner[0]) for v in value]
        return [None if v is _DROPPED else v for v, _ in parts], all(intact for _, intact in parts)
    return _DROPPED, False


@cache
def _bare(kind: Any) -> Any:
    """A type without its meaning, but with its bounds."""
    while get_origin(kind) in (Required, NotRequired):
        (kind,) = get_args(kind)
    if not meaning(kind):
        return kind
    type_, *extra = get_args(kind)
    bounds = [m for m in extra if not isinstance(m, str)]
    return Annotated[(type_, *bounds)] if bounds else type_
