"""What a run reports about its groups: evidence, trials, the final groups, and warnings.

Everything is read from events, so that a running, finished or resumed run and a reader of its
directory report the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from coterie.channel.outliers import without_name
from coterie.core.events import Event

Noted = tuple[int, Mapping[str, Any]]  # the round of an event (0: before the first), and a note

WARNING = "warning"  # a note with sentences by parameter, each shown once, immediately
WARNING_AT_END = "warning_at_end"  # the same, shown at the end; "" cancels one
_NAMED = 12  # the most clients that a sentence lists


def grouping_of(
    events: Sequence[Event], groups: int, over: bool = True, round_samples: float = 0.0
) -> dict[str, Any]:
    """Where the groups of a run come from: ``evidence``, ``verdict``, ``probes``, a ``sentence``.

    ``groups`` is the present number of groups, ``over`` whether the run has ended, and
    ``round_samples`` the number of samples that all clients process in a round. The table is empty
    if the method notes nothing about its groups.
    """
    evidence, verdict = deciding(events, "evidence", groups), deciding(events, "verdict", groups)
    if evidence is None and verdict is None:
        reasons = [w for e in events if isinstance(w := _notes(e).get("why"), str) and w]
        return {"sentence": _ended(f"{_so_many(groups)}: {reasons[-1]}")} if reasons else {}
    grouping: dict[str, Any] = {}
    if evidence is not None:
        grouping["evidence"] = _evidence(*evidence)
        samples = [float(e.get("samples") or 0) for _, e in noted(events, "evidence")]
        grouping["probes"] = {"asked": len(samples), "samples": sum(samples)}
        if round_samples:
            grouping["probes"]["rounds"] = round(sum(samples) / round_samples, 2)
    if verdict is not None:
        grouping["verdict"] = {
            "chosen": verdict[1].get("chosen"),
            **({"steps": verdict[1]["steps"]} if verdict[1].get("steps") else {}),
            "why": str(verdict[1].get("why", "")),
            "round": verdict[0],
        }
    shares = [w for e in events if isinstance(w := _notes(e).get("own_group"), float)]
    if groups > 1 and shares:
        grouping["own_group"] = shares[-1]
    grouping["sentence"] = _ended(_sentence(groups, evidence, verdict, over))
    return grouping


def noted(events: Iterable[Event], key: str) -> list[Noted]:
    """The tables under this key in the notes of events, each with its round."""
    notes = [(int(e.get("round") or 0), _notes(e).get(key)) for e in events]
    return [(number, note) for number, note in notes if isinstance(note, Mapping)]


def deciding(events: Sequence[Event], key: str, groups: int) -> Noted | None:
    """The evidence, or the verdict, that the present groups come from; None if there is none.

    For several groups that is the last verdict that formed groups, and the last evidence for groups
    up to then: later questions within a group changed nothing. For one group it is the last one.
    """
    matching, verdicts = noted(events, key), noted(events, "verdict")
    adopted = [verdict for verdict in verdicts if (verdict[1].get("chosen") or 1) > 1]
    last_round = adopted[-1][0] if adopted else math.inf
    size = {"evidence": "groups", "verdict": "chosen"}[key]
    several = [e for e in matching if (e[1].get(size) or 1) > 1 and e[0] <= last_round]
    chosen = several if groups > 1 and several else matching
    return chosen[-1] if chosen else None


def round_samples(counts: Iterable[int], train: Mapping[str, Any]) -> float:
    """The samples that clients with these counts process in a round of this training.

    >>> round_samples([100, 50], {"epochs": 2}), round_samples([100, 8], {"steps": 5})
    (300.0, 200.0)
    """
    epochs, steps = train.get("epochs", 1), train.get("steps")
    if steps and epochs:
        return float(sum(min(train.get("batch_size", 32), n) * steps for n in counts))
    return float(sum(counts) * epochs)


def rested(rounds: Sequence[Event]) -> list[bool]:
    """Whether layers were skipped in each round, so that clients kept their own versions.

    A skipped layer was found quiet in the round before.

    >>> quiet = {"quiet": {"0": ["body"]}}
    >>> notes = [{"all_due": due, **quiet} for due in (False, False, True)]
    >>> rested([{"notes": {"layers": layers}} for layers in notes])
    [False, True, False]
    """
    layers = [
        notes if isinstance(notes := _notes(e).get("layers"), Mapping) else {} for e in rounds
    ]
    quiet = [{}, *(table.get("quiet", {"?": ["?"]}) for table in layers)]  # of a version without it
    due = [table.get("all_due", True) for table in layers]
    return [
        not all_due and isinstance(was_quiet, Mapping) and any(was_quiet.values())
        for all_due, was_quiet in zip(due, quiet, strict=False)
    ]


# --- in words -----------------------------------------------------------------------------------


def grouping_lines(
    grouping: Mapping[str, Any], name: Callable[[int], str] | None = None
) -> list[str]:
    """A grouping in sentences: its origin, certainty, clients between groups, and cost."""
    lines = [str(grouping["sentence"])] if grouping.get("sentence") else []
    parts = (
        how_sure(grouping),
        between_groups(grouping, name),
        own_weight(grouping),
        probing_cost(grouping),
    )
    return lines + [text for text in parts if text]


def how_sure(grouping: Mapping[str, Any]) -> str:
    """How certain the evidence is; empty if it is for one group."""
    evidence = grouping.get("evidence") or {}
    groups = evidence.get("groups") or 1
    if groups < 2 or evidence.get("kappa") is None:
        return ""
    others = [str(k) for k in evidence.get("plausible") or () if k != groups]
    comparison = "fewer groups predict clearly worse"
    if evidence.get("decisive"):
        comparison = "fewer groups and more both predict clearly worse"
    elif others:
        comparison = f"{spoken(others)} groups predict about as well"
    return (
        f"Evidence for {groups} groups: reproducibility κ {evidence['kappa']:.2f}, "
        f"{100 * evidence['explained']:.0f} % of one mean's error explained; {comparison}."
    )


def between_groups(grouping: Mapping[str, Any], name: Callable[[int], str] | None = None) -> str:
    """Which clients sit between two groups; empty if the evidence is for one group."""
    evidence = grouping.get("evidence") or {}
    if (evidence.get("groups") or 1) < 2:
        return ""
    between = list(evidence.get("between") or ())
    if not between:
        return "No client sits between two groups."
    verb = "sits" if len(between) == 1 else "sit"
    return f"{_people(between, name)} {verb} between two groups."


def own_weight(grouping: Mapping[str, Any]) -> str:
    """The weight that clients give to their own group, for methods that weight all clients.

    >>> own_weight({"own_group": 0.987})
    "On average 99 % of a client's model comes from its own group."
    """
    share = grouping.get("own_group")
    if share is None:
        return ""
    return f"On average {100 * share:.0f} % of a client's model comes from its own group."


def probing_cost(grouping: Mapping[str, Any]) -> str:
    """The local training that the evidence and the deciding trial took."""
    steps = (grouping.get("verdict") or {}).get("steps")
    trial = (
        f"For the trial every client trained a copy for at least {steps} steps." if steps else ""
    )
    return " ".join(filter(None, (_probes_cost(grouping), trial)))


def _probes_cost(grouping: Mapping[str, Any]) -> str:
    probes = grouping.get("probes") or {}
    if not probes.get("samples"):
        return ""
    asked = probes.get("asked") or 1
    subject = "The probe" if asked == 1 else f"The {asked} probes"
    if probes.get("rounds") is None:
        return f"{subject} processed {probes['samples']:.0f} samples on the clients."
    return f"{subject} took as much local training as {_rounds(probes['rounds'])} of all clients."


def news_of(event: Event) -> list[str]:
    """The news of an event that the terminal shows immediately."""
    news = []
    for _, evidence in noted([event], "evidence"):
        between = between_groups({"evidence": _evidence(0, evidence)})
        addition = f"; {between[0].lower()}{between[1:].rstrip('.')}" if between else ""
        news.append(f"evidence: {str(evidence.get('why', '')).rstrip('.')}{addition}")
    news += [f"trial: {verdict.get('why', '')}" for _, verdict in noted([event], "verdict")]
    return news


def warnings_of(events: Sequence[Event], over: bool = True) -> list[str]:
    """The warnings of a run, one for each parameter; once it is over, also those for the end.

    There is a warning when a reply of a client is left out for the first time, and for a group that
    was too small for a secure sum in all rounds.
    """
    first, last = dict[str, str](), dict[str, str]()
    for event in events:
        for client, reason in (event.get("rejected") or {}).items():
            when = f"round {event['round']}" if event.get("round") else "the set-up before round 1"
            when = "the closing scores" if event.get("event") == "closing" else when
            text = f"client {client} was left out of {when}: {without_name(str(reason))}"
            first.setdefault(f"client {client}", text)
    for _, warnings in noted(events, WARNING):
        for key, text in warnings.items():
            first.setdefault(str(key), str(text))
    for _, warnings in noted(events, WARNING_AT_END):
        last |= {str(k): str(text) for k, text in warnings.items()}
    at_end = [text for key, text in last.items() if text and key not in first] if over else []
    return [*first.values(), *at_end, *(_never_summed(events) if over else [])]


def _never_summed(events: Sequence[Event]) -> list[str]:
    """Warnings about groups whose sums were withheld in all rounds."""
    rounds = [e for e in events if e.get("round") and "event" not in e]
    withheld = [e.get("withheld") or {} for e in rounds]
    always = set.intersection(*map(set, withheld)) if withheld else set()
    return [
        f"group {slot} had no sum in any round, so its clients' model never changed: "
        f"{withheld[-1][slot]}"
        for slot in sorted(always)
    ]


# --- the smaller parts --------------------------------------------------------------------------


def _evidence(number: int, notes: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the evidence that the summary keeps."""
    groups = int(notes.get("groups") or 1)
    clients, certainty = notes.get("clients") or (), notes.get("certainty") or ()
    return {
        "groups": groups,
        "kappa": (notes.get("kappa") or {}).get(str(groups)),
        "explained": notes.get("explained", 0.0),
        "decisive": bool(notes.get("decisive")),
        "plausible": plausible(notes),
        "by": notes.get("by"),
        "steps": notes.get("steps"),
        "samples": notes.get("samples"),
        "why": str(notes.get("why", "")),
        "between": [c for c, certain in zip(clients, certainty, strict=False) if certain < 0],
        "round": number,
    }


def plausible(notes: Mapping[str, Any]) -> list[int]:
    """The numbers of groups whose error is within one standard error of the lowest."""
    errors, deviations = notes.get("errors") or {}, notes.get("deviations") or {}
    lowest = min(errors.values(), default=0.0)
    return [int(k) for k, error in errors.items() if error <= lowest + deviations.get(k, 0.0)]


def spoken(numbers: Sequence[str]) -> str:
    """Numbers in a sentence; for many, only the first and the last.

    >>> spoken(["3"]), spoken(["3", "5", "6"])
    ('3', '3, 5 and 6')
    """
    if len(numbers) >= _NAMED:
        return f"{numbers[0]} to {numbers[-1]}"
    *most, last = numbers
    return f"{', '.join(most)} and {last}" if most else last


def _sentence(groups: int, evidence: Noted | None, verdict: Noted | None, over: bool) -> str:
    probed, notes = evidence or (0, {})
    k, why = int(notes.get("groups") or 1), str(notes.get("why", ""))
    tried, trial = verdict or (-1, {})
    chosen, trial_why = trial.get("chosen"), str(trial.get("why", ""))
    if groups > 1 and chosen and chosen > 1:
        if chosen == groups:
            return f"{groups} groups, by the trial in round {tried}: {_they(trial_why, groups)}"
        return f"{groups} groups; the last split came from the trial in round {tried}: {trial_why}"
    if groups > 1:
        when = "before the first round" if not probed else f"in round {probed}"
        no_trial = f". No trial: {trial_why}" if trial_why and chosen is None else ""
        if k == groups:
            return f"{groups} groups, by the evidence {when}: {_they(why, groups)}{no_trial}"
        return f"{groups} groups; the evidence {when} says: {why}{no_trial}"
    if tried >= probed and trial_why:
        although = f", although the evidence finds {k} groups" if k > 1 and chosen else ""
        return f"One group: {trial_why}{although}"
    if k > 1 and over:
        return f"One group: the evidence finds {k} groups, but no trial has confirmed them"
    if k > 1:
        return f"One group so far: the evidence finds {k} groups; a trial will tell if they pay"
    return f"One group: {why}"


def _they(why: str, groups: int) -> str:
    """A reason without the number of groups, if the sentence has just named it."""
    named = f"{groups} groups "
    return f"they {why.removeprefix(named)}" if why.startswith(named) else why


def _so_many(groups: int) -> str:
    return "One group" if groups == 1 else f"{groups} groups"


def _people(clients: Sequence[int], name: Callable[[int], str] | None) -> str:
    """Clients in a sentence, by name where they have one.

    >>> _people([3], None), _people([3, 5], None), _people([0, 1], ["ann", "bob"].__getitem__)
    ('Client 3', 'Clients 3 and 5', 'ann and bob')
    """
    labels = [str(c) if name is None else name(c) for c in clients]
    shown = labels[:_NAMED] + ([f"{len(labels) - _NAMED} more"] if len(labels) > _NAMED else [])
    *most, last = shown
    text = f"{', '.join(most)} and {last}" if most else last
    return text if name is not None else f"Client{'s' * (len(labels) > 1)} {text}"


def _rounds(count: float) -> str:
    """A number of rounds with suitable precision.

    >>> _rounds(1.0), _rounds(0.42), _rounds(12.3)
    ('1 round', '0.4 rounds', '12 rounds')
    """
    text = f"{count:.0f}" if count >= 10 or count == round(count) else f"{count:.1f}"
    return f"{text} round{'s' * (text != '1')}"


def _ended(text: str) -> str:
    return f"{text.rstrip('.')}."


def _notes(event: Event) -> Mapping[str, Any]:
    notes = event.get("notes")
    return notes if isinstance(notes, Mapping) else {}
