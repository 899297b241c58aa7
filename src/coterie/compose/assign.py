"""Who learns together: the rules by which clients are assigned to groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from coterie.client import Task
from coterie.compose.local import Check
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Reply, Scalar, Slot
from coterie.core.method import Round, Setup, State
from coterie.core.weights import Weights
from coterie.errors import ConfigError

Admit = Callable[[Federation, State, Round], State]


More = Callable[[Collection[ClientId]], list[Reply]]


Sorts = Callable[[State, Round, list[Reply], More], tuple[State, list[Reply]]]


@dataclass(frozen=True)
class Assign:
    """A grouping rule: the models and groups to begin with, and where newcomers go.

    A client gets the model of its group and trains it; or, if it ``picks``, it is offered every
    model and takes the one that fits its training data best; or, if ``parallel``, it trains every
    model. What it sends goes into its group's mean, or where ``mixes(state, client)`` says, in
    those shares. Without ``admit`` a newcomer picks. ``tasks`` are what the rule asks of clients,
    ``tells(state)`` what it has to say to those who train; ``check`` refuses what does not fit,
    ``takes_as_public``, ``needs_public`` and ``shows`` are as in ``Method``.

    A rule that ``sorts`` looks at single replies, in the rounds in which ``looks(state, info)``:
    from the state, what the cohort sent, and a way to have ``more`` clients train as well, come the
    state with the new groups, and the replies that go into their means.

    A rule that ``probes`` may ask clients something before a round. One that remembers a ``trial``
    (``coterie.compose.trial``) has it carried out when it is due;
    ``regrouped(before, after)`` then brings what else the rule remembers up to date.
    """

    start: Callable[[Federation, Setup], State]
    admit: Admit | None = None
    picks: bool = False
    most: int = 0  # models that a client chooses among; 0: any number
    parallel: bool = False
    mixes: Callable[[State, ClientId], Mapping[Slot, float]] | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict)
    sees: str = "means"
    tells: Callable[[State], Mapping[str, Scalar]] = lambda _: {}
    check: Check | None = None
    sorts: Sorts | None = None
    looks: Callable[[State, Round], bool] = lambda *_: True
    probes: Callable[[Federation, State, Round], State] | None = None
    regrouped: Callable[[State, State], State] = lambda _, after: after
    needs_all_layers: str = ""
    takes_as_public: str = ""
    needs_public: bool = False
    no_noise: str = ""
    sums: int = 1
    shows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def everyone() -> Assign:
    """One group of all."""
    return Assign(
        lambda _, setup: State({0: setup.start}, dict.fromkeys(setup.clients, 0)),
        lambda _, state, info: state.joined(dict.fromkeys(info.cohort, 0)),
    )


def alone() -> Assign:
    """Each client by itself, the server without a model."""
    return Assign(
        lambda _, setup: State({}, {c: c for c in setup.clients}),
        lambda _, state, info: state.joined({c: c for c in info.cohort}),
    )


def true_groups() -> Assign:
    """The scenario's own groups."""

    def start(_: Federation, setup: Setup) -> State:
        if setup.groups is None:
            raise ConfigError(
                "method oracle needs a scenario with known groups: give the data a shift by group "
                "(such as --shift rotation) or a partition with groups"
            )
        models: dict[Slot, Weights] = dict.fromkeys(sorted(set(setup.groups.values())), setup.start)
        groups = {c: setup.groups[c] for c in setup.clients}
        return State(models, groups, {"truth": dict(setup.groups)})

    def admit(_: Federation, state: State, info: Round) -> State:
        truth = state.memory["truth"]
        for client in info.cohort:
            if client not in truth:
                raise ConfigError(
                    f"method oracle cannot admit client {client}: nobody told it the true group"
                )
        return state.joined({c: truth[c] for c in info.cohort})

    return Assign(start, admit)


def by_loss(k: int) -> Assign:
    """Groups by the lowest training loss among k models; the first model is θ⁰."""

    def start(_: Federation, setup: Setup) -> State:
        models: dict[Slot, Weights] = {0: setup.start}
        return State(models | {i: setup.fresh(i) for i in range(1, k)})

    def check(setup: Setup) -> None:
        if k > len(setup.clients):
            raise ConfigError(f"k = {k} models for {len(setup.clients)} clients: take fewer")

    return Assign(start, picks=True, most=k, check=check)
