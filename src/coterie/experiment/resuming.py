"""Choose the checkpoint that a run resumes from, and tell what that would lose."""

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
    """The checkpoints, oldest first, up to the newest that has its history and client states.

    ``store`` holds the client states; it is None if clients are on other machines. A simulation
    falls back to an older checkpoint if it must, and repeats the later rounds to the same bits.
    History that no checkpoint has in full, and rounds that clients elsewhere would have to repeat,
    would be lost for good: that is a LostHistory unless ``discard`` accepts it.
    """
    good, newest = checkpoints.load(layout), max(checkpoints.numbers())
    usable: list[int] = []  # indices into ``good``, newest first
    reasons: list[str] = []  # why newer ones are not used
    errors: list[RunDirError] = []
    complete = False
    for index in reversed(range(len(good))):
        try:
            _check_states(good[index], store)
        except RunDirError as error:
            errors.append(error)
            reasons.append(str(error))
            continue
        usable.append(index)
        missing = run.missing(good[index].rounds, good[index].lines)
        complete = not missing
        if complete or store is None:
            break
        reasons.append(missing)
    if not usable:
        raise errors[0]
    chosen = usable[-1] if complete else usable[0]
    last = good[chosen]
    loss = run.missing(last.rounds, last.lines)
    if last.rounds < newest:
        reason = reasons[0] if reasons else f"the checkpoint of round {newest} is damaged"
        step_back = f"{run.path} returns from round {newest} to round {last.rounds} ({reason})"
        if store is None:
            loss = loss or f"{step_back}: the work of clients since then would be lost"
        elif say is not None:
            say(f"warning: {step_back}; the rounds since then are repeated")
    if loss and not discard:
        raise LostHistory(
            f"{loss}. Restore the damaged file from a copy, or accept the loss with {DISCARD}: "
            "nothing is deleted, the damaged file is kept under another name"
        )
    if loss and say is not None:
        say(f"warning: {loss}: discarded, as requested")
    return good[: chosen + 1]


def _check_states(checkpoint: Checkpoint, store: Store | None) -> None:
    """Raise a RunDirError if a client state of the checkpoint is missing or damaged."""
    if store is not None:
        for client, version in checkpoint.channel["versions"].items():
            store.read(client, version)
