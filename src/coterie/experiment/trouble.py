"""Trouble that a run would otherwise keep silent about, each told in a line, once.

Scores are compared with the best *constant* answer: the most frequent class, or the mean of the
targets, of all training data. A model that is no better has learned nothing that holds for all
clients. Nothing is trained or exchanged for it, and nothing in the run depends on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from coterie.client.fit import Criterion
from coterie.core.loop import Event, Observer
from coterie.data.population import Population
from coterie.experiment.session import RunSession
from coterie.registry import METHODS
from coterie.results.evaluation import Scores
from coterie.results.findings import WARNING, WARNING_AT_END, grouping_of, noted

# A loss that grew tenfold has left what overfitting and differing clients make of it: below that
# nothing is said, at the cost of not telling a slower growth.
EXPLODED = 10.0
# A loss that has moved less than this since round 1, and is no better than a constant answer's, is
# still at its start: progress of less than 1 % in a third of the rounds is told as none.
STILL = 0.01
# An accuracy within two standard errors of the best constant answer's may be chance. A model that
# is a little above it is told to be at chance, too, but only if its loss says the same.
ERRORS = 2.0
# Before this round nothing is said about slow progress: few rounds often end where they began. The
# cost is that runs of fewer rounds are never told.
EARLIEST = 10
WORSE = 0.02  # adapting that costs less than two points is not worth a line
_KINDS = 20  # distinct whole numbers that may be classes
_REPEATED = 10  # samples of each, on average
# Methods whose groups are given, or are asked for as an answer.
_GIVEN = ("oracle", "known-groups", "group-evidence")


@dataclass(frozen=True)
class Constant:
    """What a constant answer scores on clients' test data: its loss, its score, and its error.

    ``score`` is the accuracy, or for numbers the root mean squared error.
    """

    loss: float
    score: float
    error: float


@dataclass
class Trouble(Observer):
    """Adds warnings to the notes of the first event in which a run is in trouble."""

    session: RunSession

    def prepared(self, event: Event) -> None:
        """Before the first round: targets that may be classes."""
        if "python" in self.session.experiment.config and self.session.remote is None:
            self._tell("float-labels", may_be_classes(self.session.population))

    def after(self, event: Event) -> None:
        """After a round: the loss and the accuracy."""
        run = self.session.run
        if "received" not in event and event["round"] < run.rounds:
            return
        for key, text in self._scores().items():
            self._tell(key, text)

    def _tell(self, key: str, text: str) -> None:
        run = self.session.run
        if text and not any(key in table for _, table in noted(run.events, WARNING)):
            table = run.state.notes.get(WARNING) or {}
            notes = {**run.state.notes, WARNING: {**table, key: text}}
            run.state = replace(run.state, notes=notes)

    # --- scores ----------------------------------------------------------------------------------

    def _scores(self) -> dict[str, str]:
        run, by = self.session.run, self.session.judged_by
        scored = [e for e in run.history if e.get("received")]
        losses = [(e["round"], _number(e["received"].get("loss"))) for e in scored]
        if exploded := has_exploded(losses, self.constant, self._rate):
            return {"exploded": exploded}
        due = max(EARLIEST, math.ceil(run.rounds / 3))
        if not scored or scored[-1]["round"] < due:
            return {}
        now = _number(scored[-1]["received"].get(by if by == "accuracy" else "rmse"))
        rounds = scored[-1]["round"], run.rounds
        text = is_at_chance(losses, now, self.constant, by, rounds, self._rate)
        return {"at-chance": text} if text else {}

    @property
    def _rate(self) -> float:
        return self.session.experiment.schedule.lr

    @cached_property
    def constant(self) -> Constant | None:
        """The scores of a constant answer; None where the server has no data of clients."""
        if self.session.remote is not None:
            return None
        return constant(self.session.population, self.session.experiment.criterion)


def never_grouped(session: RunSession) -> str:
    """Whether a method that groups never did, without having said why, as a sentence.

    It is asked when a run is over: a run that goes on for more rounds may still form groups.
    """
    run, method = session.run, session.experiment.method
    parts = method.name.split("+")
    groups = [p for p in parts if METHODS.index.get(p, {}).get("family") == "clustered"]
    given = method.source.parameters if method.source else {}
    asked_for_one = any(given.get(key) == 1 for key in ("k", "clusters"))
    asked_for_one |= given.get("eps1") == 0  # CFL that never splits
    if not groups or asked_for_one or groups[0] in _GIVEN or len(session.members) < 2:
        return ""
    if noted([*run.events, {"round": 0, "notes": dict(run.state.notes)}], WARNING_AT_END):
        return ""  # it says itself which limit was never met
    seen = [{g for g in e.get("groups", ()) if g is not None} for e in run.history]
    if any(len(groups) != 1 for groups in seen) or grouping_of(run.events, 1).get("sentence"):
        return ""
    others = [p for p in parts if p != groups[0]]
    same_as = "+".join(others) or "fedavg"
    return (
        f"every client was in the same group in all {len(seen)} rounds, so {method.name} "
        f"trained as {same_as} does: there may be no groups (coterie groups tells), or the "
        "models to choose from were too alike at the start"
    )


def has_exploded(losses: list[tuple[int, float]], constant: Constant | None, rate: float) -> str:
    """Whether the last loss is far above the lowest and a constant answer's, as a sentence."""
    known = [(number, loss) for number, loss in losses if not math.isnan(loss)]
    if not losses or (len(known) == len(losses) and len(known) < 2):
        return ""
    last_round, last = losses[-1]
    if math.isnan(last) or math.isinf(last):
        return (
            f"the loss is no longer finite in round {last_round}: lower the learning rate "
            f"({rate:g}), or clip gradients (train.clip)"
        )
    first_round, lowest = min(known[:-1], key=lambda pair: pair[1])
    level = constant.loss if constant is not None else 0.0
    if last <= EXPLODED * lowest or last <= level:
        return ""
    return (
        f"the loss exploded: {_short(last)} in round {last_round}, after {_short(lowest)} in round "
        f"{first_round}. Lower the learning rate ({rate:g}), or clip gradients (train.clip)"
    )


def is_at_chance(
    losses: list[tuple[int, float]],
    now: float,
    constant: Constant | None,
    judged_by: str,
    rounds: tuple[int, int],
    rate: float,
) -> str:
    """Whether neither the score nor any loss is better than a constant answer's, as a sentence."""
    known = [loss for _, loss in losses if not math.isnan(loss)]
    if constant is None or math.isnan(now) or not known:
        return ""
    first, last, lowest = known[0], known[-1], min(known)
    still = abs(last - first) < STILL * abs(first)
    if judged_by == "accuracy":
        beaten = now > constant.score + ERRORS * constant.error
        shown = f"accuracy ({100 * now:.1f} %) is no better than always giving one class"
        shown += f" ({100 * constant.score:.1f} %)"
    else:
        beaten = now < constant.score
        shown = f"error ({_short(now)}) is no better than always giving the mean"
        shown += f" ({_short(constant.score)})"
    if lowest < constant.loss * (1 - STILL) or (beaten and not still):
        return ""
    when = "after {} of {} rounds".format(*rounds)
    check = "check also that labels belong to their inputs"
    if still:
        return (
            f"{when} the loss is still at its start ({_short(last)}), and no better than that of a "
            f"constant answer: the learning rate ({rate:g}) is far too low, or so high that the "
            f"model died in round 1; {check}"
        )
    if last > 1.1 * lowest:  # it jumps about; less may be noise
        return (
            f"{when} the {shown}, and the loss does not fall ({_short(last)} after "
            f"{_short(lowest)}): the learning rate ({rate:g}) is far too high, or the loss does "
            f"not fit the outputs; {check}"
        )
    if len(known) > 1 and last < known[-2] * (1 - STILL):  # it is on its way
        return ""
    return (
        f"{when} the {shown}, and neither is the loss ({_short(last)}): try other learning rates "
        f"({rate:g} now) and more epochs; {check}"
    )


def constant(population: Population, criterion: Criterion) -> Constant | None:
    """The scores of the best constant answer on clients' test data; None if there are none."""
    clients = [c for c in population.clients if len(c.test)]
    trained = [c.train.y for c in population.clients if len(c.train)]
    if not clients or not trained:
        return None
    y = torch.cat(trained)
    losses, scores, errors = [], [], []
    try:
        if population.classes is not None:
            shares = torch.bincount(y, minlength=len(population.classes)).double() + 1e-9
            answer = (shares / shares.sum()).log().float()
            tests = [_shares(c.test.y, len(population.classes)) for c in clients]
            best = int(torch.stack(tests).mean(0).argmax())  # in hindsight
        else:
            answer, best = y.double().mean(0).float().reshape(-1), 0
        for client in clients:
            out = answer.expand(len(client.test), -1)
            if population.classes is None:
                out = out.reshape(client.test.y.shape)
            losses.append(float(criterion(out, client.test.y)))
            if population.classes is not None:
                share = float((client.test.y == best).double().mean())
                scores.append(share)
                errors.append(share * (1 - share) / len(client.test))
            else:
                miss = (out - client.test.y).double().square()
                scores.append(math.sqrt(float(miss.mean())))
    except Exception:  # a loss of the user's own may want more of its inputs than a constant has
        return None
    error = math.sqrt(sum(errors)) / len(clients)  # of a mean over clients; 0 for numbers
    found = Constant(float(np.mean(losses)), float(np.mean(scores)), error)
    return found if math.isfinite(found.loss) and found.loss > 0 else None


def _shares(y: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.bincount(y, minlength=classes).double() / len(y)


def may_be_classes(population: Population) -> str:
    """Whether float targets look like the numbers of classes, as a sentence."""
    if population.classes is not None:
        return ""
    y = torch.cat([c.train.y.reshape(-1) for c in population.clients])
    if not len(y) or bool((y != y.round()).any()):
        return ""
    values = torch.from_numpy(np.unique(y.numpy()))
    first, count = int(values[0]), len(values)
    in_a_row = first in (0, 1) and int(values[-1]) == first + count - 1
    if not (2 <= count <= _KINDS and in_a_row and len(y) >= _REPEATED * count):
        return ""
    return (
        f"the labels are floats, so this is a regression, but they are whole numbers from {first} "
        f"to {first + count - 1}. If these are classes, pass whole numbers: y.long() of a tensor, "
        "y.astype(int) of an array"
    )


def adapting_harms(received: Scores, adapted: Scores, judged_by: str, epochs: int) -> str:
    """Whether adapting to clients' own data made their models worse, as a sentence.

    The clients' differences must be below zero by two standard errors, and on average by two
    points.
    """
    key = f"test_{judged_by}"
    pairs = [
        (received[c][key], adapted[c][key])
        for c in received
        if received[c].get("test_count") and key in received[c] and key in adapted.get(c, {})
    ]
    if len(pairs) < 2:
        return ""
    before, after = np.array(pairs).T
    gains = after - before
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains))
    if not (gains.mean() < -WORSE and gains.mean() < -2 * error):
        return ""
    shown = [
        f"{100 * mean:.1f} %" if judged_by == "accuracy" else f"{mean:.3f}"
        for mean in (float(after.mean()), float(before.mean()))
    ]
    fewer = f"fewer epochs than {epochs}, " if epochs > 1 else ""
    return (
        f"adapting the received models to clients' own data made them worse: {shown[0]} "
        f"instead of {shown[1]}. Use them as received, or adapt them less: {fewer}a lower learning "
        "rate, or evaluation.adapt_epochs = 0"
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _short(value: float) -> str:
    return f"{value:.3g}"
