"""Grouping rules: how clients are assigned to the groups that learn together."""

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
    """A grouping rule: the initial models and groups, and the assignment of clients to groups.

    By default, a client receives and trains the model of its group. If it ``picks``, it receives
    all models and trains the one that fits its training data best; if ``parallel``, it trains all
    models. Its update is added to its group's mean, or to several means with the weights
    ``mixes(state, client)``. ``admit`` assigns newcomers; by default, they pick a model.
    ``tasks`` are the rule's own client tasks, ``tells(state)`` is added to the configuration of
    training orders, and ``check`` raises an error for setups that do not fit. ``takes_as_public``,
    ``needs_public``, ``same_steps`` and ``shows`` are as in ``Method``.

    ``sorts`` forms groups from single replies, in the rounds in which ``looks(state, info)`` is
    true. It receives the state, the round, the cohort's replies, and a function that has ``more``
    clients train as well; it returns the state with the new groups, and the replies to average.

    ``probes`` may exchange messages with clients before a round. A trial that the rule has put in
    the memory as ``trial`` (``coterie.compose.trial``) takes place when it is due;
    ``regrouped(before, after)`` then updates the rest of the rule's memory.
    """

    start: Callable[[Federation, Setup], State]
    admit: Admit | None = None
    picks: bool = False
    most: int = 0  # the most models that a client chooses among; 0: no limit
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
    same_steps: str = ""
    shows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def everyone() -> Assign:
    """Put all clients into one group."""
    return Assign(
        lambda _, setup: State({0: setup.start}, dict.fromkeys(setup.clients, 0)),
        lambda _, state, info: state.joined(dict.fromkeys(info.cohort, 0)),
    )


def alone() -> Assign:
    """Let each client train by itself, without a model on the server."""
    return Assign(
        lambda _, setup: State({}, {c: c for c in setup.clients}),
        lambda _, state, info: state.joined({c: c for c in info.cohort}),
    )


def true_groups() -> Assign:
    """Use the true groups of the scenario."""

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
                    f"method oracle cannot admit client {client}: its true group is unknown"
                )
        return state.joined({c: truth[c] for c in info.cohort})

    return Assign(start, admit)


def by_loss(k: int) -> Assign:
    """Let clients choose the model with the lowest training loss of k models; the first is θ⁰."""

    def start(_: Federation, setup: Setup) -> State:
        models: dict[Slot, Weights] = {0: setup.start}
        return State(models | {i: setup.fresh(i) for i in range(1, k)})

    def check(setup: Setup) -> None:
        if k > len(setup.clients):
            raise ConfigError(
                f"k = {k} models for {len(setup.clients)} clients: choose a smaller k"
            )

    return Assign(start, picks=True, most=k, check=check)
