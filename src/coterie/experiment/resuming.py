"""Which checkpoint a run goes on from, and what that would lose."""

from __future__ import annotations

from collections.abc import Callable

from coterie.client.store import Store
from coterie.core.weights import Layout
from coterie.errors import LostHistory, RunDirError
from coterie.experiment.checkpoint import Checkpoint, Checkpoints
from coterie.results.rundir import RunDir

DISCARD = "--discard-damaged (from Python: discard_damaged=True)"


def sound(
    run: RunDir,
    checkpoints: Checkpoints,
    layout: Layout,
    store: Store | None,
    discard: bool = False,
    say: Callable[[str], None] | None = None,
) -> list[Checkpoint]:
    """The checkpoints, oldest first, up to the newest with all that belongs to it.

    That is the history, and the state of clients; ``store`` is None if they are elsewhere. A
    simulation goes back to an older checkpoint if need be: it does the rounds after it again, to
    the same bits. What would be lost for good is a LostHistory, unless it may be discarded: history
    that no checkpoint is whole with, and rounds that clients elsewhere have done.
    """
    good, newest = checkpoints.load(layout), max(checkpoints.numbers())
    usable: list[int] = []  # places among the good ones, newest first
    whys: list[str] = []  # not the newer ones
    errors: list[RunDirError] = []
    whole = False
    for place in reversed(range(len(good))):
        try:
            _check_states(good[place], store)
        except RunDirError as error:
            errors.append(error)
            whys.append(str(error))
            continue
        usable.append(place)
        gone = run.missing(good[place].rounds, good[place].lines)
        whole = not gone
        if whole or store is None:
            break
        whys.append(gone)
    if not usable:
        raise errors[0]
    chosen = usable[-1] if whole else usable[0]
    last = good[chosen]
    loss = run.missing(last.rounds, last.lines)
    if last.rounds < newest:
        why = whys[0] if whys else f"the checkpoint of round {newest} is damaged"
        back = f"{run.path} goes back from round {newest} to round {last.rounds} ({why})"
        if store is None:
            loss = loss or f"{back}: what clients have done since would be lost"
        elif say is not None:
            say(f"warning: {back}; the rounds since are done again")
    if loss and not discard:
        raise LostHistory(
            f"{loss}. Put back a copy of what is damaged, or accept the loss with {DISCARD}: "
            "nothing is deleted, what is damaged is kept beside under another name"
        )
    if loss and say is not None:
        say(f"warning: {loss}: discarded, as asked")
    return good[: chosen + 1]


def _check_states(checkpoint: Checkpoint, store: Store | None) -> None:
    """A RunDirError if the state of a client that the checkpoint names is not there, or damaged."""
    if store is not None:
        for client, version in checkpoint.channel["versions"].items():
            store.read(client, version)
