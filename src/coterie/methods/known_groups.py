"""Groups that the user gives: a table of clients, a file, or a metadata column."""

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
    """Groups that you give, by a metadata column, a file or a table, with a model for each.

    Family: clustered.
    Rule: FedAvg inside each group.
    Args:
        groups: a metadata column, such as ``"site"``; a file with the group of each client (JSON,
            CSV or TSV, read once, when the run begins); or the groups themselves, as a table
            ``{client = "group"}`` by id or name, or as a list in the order of the clients. The
            column ``group`` holds the true groups of a scenario that has any.
    Server sees: means, and the groups that you give.
    Travels: 1 model down, 1 up.
    Newcomers: join the group given in the column or the file; clients not listed there are refused.
    Departs: there is no paper. The clients' data play no part in the grouping.
    Reference: none.
    """
    if isinstance(groups, str) and names_file(groups):
        return known_groups(groups=read_groups(Path(groups)))
    return grouped(NAME, given_groups(groups))


def given_groups(groups: Groups) -> Assign:
    """The rule for groups from a metadata column, a table of clients, or a list."""
    column = groups if isinstance(groups, str) else COLUMN

    def groups_of(setup: Setup) -> dict[ClientId, str]:
        if not isinstance(groups, str):
            return by_client(groups, setup.names, "method.groups")
        if groups not in setup.metadata:
            columns = ", ".join(sorted(setup.metadata)) or "none"
            raise ConfigError(
                f"method {NAME}: there is no metadata column '{groups}' (known: {columns}). Name "
                "the column in data.metadata, or give a file with the group of each client, as in "
                "--set method.groups=groups.json"
            )
        return dict(setup.metadata[groups])

    def check(setup: Setup) -> None:
        group_of = groups_of(setup)
        sizes = Counter(group_of[c] for c in setup.clients)
        small = {name: n for name, n in sorted(sizes.items()) if n < setup.smallest_group}
        if small:
            listed = ", ".join(f"'{name}' ({n} client{'s' * (n > 1)})" for name, n in small.items())
            raise ConfigError(
                f"method {NAME}: too few clients in group{'s' * (len(small) > 1)} {listed}: a "
                f"secure sum needs privacy.min_group = {setup.smallest_group}. Merge groups, lower "
                "privacy.min_group, or leave such groups untrained with privacy.small_groups = skip"
            )

    def start(_: Federation, setup: Setup) -> State:
        group_of = groups_of(setup)
        models: dict[Slot, Weights] = dict.fromkeys(sorted(set(group_of.values())), setup.start)
        return State(models, {c: group_of[c] for c in setup.clients}, {"home": group_of})

    def admit(_: Federation, state: State, info: Round) -> State:
        group_of = {**state.memory["home"], **info.metadata.get(column, {})}
        joining = {c: group_of[c] for c in info.cohort if group_of.get(c) in state.models}
        if not joining:  # in a real federation, an unknown client does not keep others out
            raise ConfigError(_refusal(info.cohort[0], group_of, state, column))
        return state.joined(joining)

    public = (
        f"the metadata column '{column}', which method {NAME} takes as public knowledge: if it was "
        "derived from the data, what it reveals about them is not counted"
        if isinstance(groups, str)
        else f"the groups given to method {NAME}, which it takes as public knowledge: what groups "
        "derived from the data reveal about them is not counted"
    )
    return Assign(start, admit, check=check, takes_as_public=public)


def _refusal(client: ClientId, group_of: Mapping[ClientId, str], state: State, column: str) -> str:
    """Why a newcomer cannot join, and what to do."""
    groups = ", ".join(map(str, state.models))
    if client in group_of:
        return (
            f"method {NAME} cannot admit client {client}: there is no trained model for its group "
            f"'{group_of[client]}' (known: {groups}). Give it one of these, or start a new run"
        )
    return (
        f"method {NAME} cannot admit client {client}: its group is not known. Give it with "
        f"--metadata {column}=NAME (known: {groups}) in coterie admit, or list the client when a "
        "run begins"
    )


def with_groups_read(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A method's parameters; if ``groups`` names a file, with the content of the file."""

    def read(groups: Any) -> Any:
        file = isinstance(groups, str) and names_file(groups)
        return read_groups(Path(groups)) if file else groups

    return with_groups(name, parameters, read)


def with_groups(
    name: str, parameters: Mapping[str, Any], change: Callable[[Any], Any]
) -> dict[str, Any]:
    """The parameters of a method or a combination, with ``change`` applied to the ``groups``.

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
