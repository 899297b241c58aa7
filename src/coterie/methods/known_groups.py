"""Groups that the user gives: a table of clients, a file, or a column of metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coterie.compose.assign import Assign
from coterie.compose.grouped import grouped
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Slot
from coterie.core.method import Method, Round, Setup, State, method
from coterie.core.weights import Weights
from coterie.data.metadata import by_client, names_file, read_groups
from coterie.errors import ConfigError

NAME, COLUMN = "known-groups", "group"
Groups = str | dict[str, Any] | list[Any]


@method
def known_groups(groups: Groups = COLUMN) -> Method:
    """Groups that you give, by a column of metadata or a file, a model for each.

    Family: clustered.
    Rule: FedAvg inside each group.
    Args:
        groups: a column of metadata, such as ``"site"``; a file with the group of each client
            (JSON, CSV or TSV, read once, when the run begins); or the groups themselves, as a
            table ``{client = "group"}`` by id or name, or a list in the order of clients. The
            column ``group`` holds the true groups of a scenario that has any.
    Server sees: means, and the groups that you give.
    Travels: 1 model down, 1 up.
    Newcomers: join the group that the column or the file says; those it does not name are refused.
    Departs: no paper; the clients' data plays no part in the grouping.
    Reference: none.
    """
    if isinstance(groups, str) and names_file(groups):
        return known_groups(groups=read_groups(Path(groups)))
    return grouped(NAME, given_groups(groups))


def given_groups(groups: Groups) -> Assign:
    """A column of metadata, a table of clients, or a list in the order of clients."""
    column = groups if isinstance(groups, str) else COLUMN

    def places(setup: Setup) -> dict[ClientId, str]:
        if not isinstance(groups, str):
            return by_client(groups, setup.names, "method.groups")
        if groups not in setup.metadata:
            known = ", ".join(sorted(setup.metadata)) or "none"
            raise ConfigError(
                f"method {NAME}: there is no metadata column '{groups}' (known: {known}). Name the "
                "column in data.metadata, or give a file with the group of each client, as in "
                "--set method.groups=groups.json"
            )
        return dict(setup.metadata[groups])

    def check(setup: Setup) -> None:
        home = places(setup)
        sizes = Counter(home[c] for c in setup.clients)
        small = {name: n for name, n in sorted(sizes.items()) if n < setup.smallest_group}
        if small:
            listed = ", ".join(f"'{name}' ({n} client{'s' * (n > 1)})" for name, n in small.items())
            raise ConfigError(
                f"method {NAME}: too few clients in group{'s' * (len(small) > 1)} {listed}: a "
                f"secure sum needs privacy.min_group = {setup.smallest_group}. Merge groups, lower "
                "privacy.min_group, or leave such groups untrained with privacy.small_groups = skip"
            )

    def start(_: Federation, setup: Setup) -> State:
        home = places(setup)
        models: dict[Slot, Weights] = dict.fromkeys(sorted(set(home.values())), setup.start)
        return State(models, {c: home[c] for c in setup.clients}, {"home": home})

    def admit(_: Federation, state: State, info: Round) -> State:
        home = {**state.memory["home"], **info.metadata.get(column, {})}
        known = {c: home[c] for c in info.cohort if home.get(c) in state.models}
        if not known:  # in a real federation, one that is not known keeps nobody else out
            raise ConfigError(_refusal(info.cohort[0], home, state, column))
        return state.joined(known)

    public = (
        f"the metadata column '{column}', which method {NAME} takes as public knowledge: if it was "
        "found on the data, what it reveals of them is not counted"
        if isinstance(groups, str)
        else f"the groups given to method {NAME}, which it takes as public knowledge: what a "
        "grouping found on the data reveals of them is not counted"
    )
    return Assign(start, admit, check=check, takes_as_public=public)


def _refusal(client: ClientId, home: Mapping[ClientId, str], state: State, column: str) -> str:
    """Why a newcomer has no place, and what to do."""
    known = ", ".join(map(str, state.models))
    if client in home:
        return (
            f"method {NAME} cannot admit client {client}: nobody has trained a model for its group "
            f"'{home[client]}' (known: {known}). Give it one of these, or start a new run"
        )
    return (
        f"method {NAME} cannot admit client {client}: its group is not known. Say it with "
        f"--metadata {column}=NAME (known: {known}) in coterie admit, or name the client when a "
        "run begins"
    )


def with_groups_read(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A method's parameters with the content of the file that ``groups`` may name."""

    def read(groups: Any) -> Any:
        file = isinstance(groups, str) and names_file(groups)
        return read_groups(Path(groups)) if file else groups

    return with_groups(name, parameters, read)


def with_groups(
    name: str, parameters: Mapping[str, Any], change: Callable[[Any], Any]
) -> dict[str, Any]:
    """The parameters of a method or a combination, ``groups`` of known-groups changed.

    >>> with_groups("known-groups+ditto", {"known-groups.groups": "a", "mu": 1}, str.upper)
    {'known-groups.groups': 'A', 'mu': 1}
    """
    changed = dict(parameters)
    if NAME not in name.split("+"):
        return changed
    for key, value in parameters.items():
        if key in ("groups", f"{NAME}.groups"):
            changed[key] = change(value)
        elif key == NAME and isinstance(value, Mapping) and "groups" in value:
            changed[key] = {**value, "groups": change(value["groups"])}
    return changed
