"""Find out whether there are groups, how certain that is, and whether training in groups helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, get_args

import torch

from coterie.client import Client
from coterie.clustering import adjusted_rand
from coterie.compose import probing
from coterie.compose.assign import Assign
from coterie.compose.grouped import grouped
from coterie.compose.probing import By, Probe, ProbeAnswer
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Order, Scalar, Upload
from coterie.core.method import Count, Method, Setup, State, method
from coterie.errors import ConfigError
from coterie.methods.by_evidence import NO_NOISE, ROOT, EvidenceRule, TrialMode, one_group

NAME = "group-evidence"
Asked = Literal["final-layer", "model", "gradient", "labels", "data", "all"]
EVERY: tuple[By, ...] = get_args(By)
BEFORE = 2  # rounds with one model before the trial
ROUNDS = BEFORE + 1
SAME = 0.8  # two groupings count as the same from this agreement on
MOSTLY = 0.9  # the share of clients for which a rule must hold
DONE = "the question about groups is answered"
# Why clients cannot be represented in some way, by the name of the metric that reports it.
IMPOSSIBLE = {
    "labels": "the targets are numbers, not classes: they have no frequencies",
    "data": "the inputs are token numbers, not quantities: they span no subspace",
}

_HELD = {"data": "inputs", "labels": "frequencies of labels"}


@method
def group_evidence(
    by: Asked = "final-layer",
    seeds: Count = 3,
    steps: Count | Literal["auto"] = "auto",
    trial: TrialMode = "auto",
) -> Method:
    """Which clients belong together, how sure that is, and whether training in groups helps.

    Family: clustered.
    Rule: every client represents itself twice, from two halves of its data, and the evidence is the
    grouping whose means over one half best predict the other. This is repeated with other halves.
    If there are groups, one model then trains for two rounds, and in a third round the same uploads
    are averaged for each candidate grouping and scored on validation data. Then the run ends.
    Args:
        by: what is compared: the change of the final layer ("final-layer") or of the whole model
            ("model") after a short training, the gradient at the start ("gradient"), the
            frequencies of the labels ("labels"), the subspace of the inputs ("data"), or "all" of
            these in turn.
        seeds: how many times the data are divided into halves, 1 or more; under secure aggregation,
            once.
        steps: steps of the short training, 1 or more, or "auto": until the median client's loss has
            fallen below a fifth of its initial value.
        trial: "auto" makes a trial if the evidence finds groups, "always" makes one in any case,
            "off" makes none.
    Server sees: each client's final layer (or what else is compared), twice for each division into
    halves; then means; in a trial each client's model.
    Travels: before the first round θ⁰ down and two final layers up for each division; in a round 1
    model down, 1 up; in a trial at most one more model up, and the models of all a client's
    candidate groups down.
    Newcomers: are probed in the same way and join the group whose mean direction is nearest.
    Departs: there is no paper. The method runs only the evidence and the trial of methods such as
    fedclust, which use them with "auto".
    Reference: none.
    """
    first: By = EVERY[0] if by == "all" else by
    probe = Probe(first, steps, fallback=by == "final-layer")
    how = EvidenceRule(probe, trial, first=BEFORE, later=BEFORE, again=False)

    def check(setup: Setup) -> None:
        if len(setup.clients) < 2:
            raise ConfigError(
                f"method {NAME} compares clients, and there is only one: provide at least two"
            )

    def start(fed: Federation, setup: Setup) -> State:
        state = one_group(setup)
        if by == "all":
            outcome = _ask_everything(fed, how.probe, setup)
        else:
            outcome = _Outcome(probing.ask(fed, how.probe, setup.start, setup.clients))
        answer = outcome.answer
        # Under secure aggregation, a client's final layer is revealed only once.
        draws = [answer, *_drawn_again(fed, answer, setup, seeds if fed.min_group == 1 else 1)]
        state = how.decided(fed, state, answer)
        placed = _placed(fed, answer, setup.clients)
        notes = {
            **state.notes,
            "grouping": {str(c): g for c, g in sorted(placed.items())},
            "stability": stability(draws),
            "samples": outcome.other_samples + sum(a.notes["samples"] for a in draws),
            **outcome.notes,
        }
        state = replace(state, notes=notes)
        if "trial" in state.memory:
            return state
        if ROOT not in state.models:  # clients too small for two halves join a group, too
            state = state.joined({c: f"0/{g}" for c, g in placed.items()})
        return replace(state, over=DONE)

    def regrouped(before: State, after: State) -> State:
        after = how.after_trial(before, after)
        return after if "trial" in after.memory else replace(after, over=DONE)

    tasks = {**probing.TASKS, "kinds": kinds_of_data}
    rule = Assign(start, how.admit, tasks=tasks, sees="each", check=check, regrouped=regrouped)
    shows = {**probing.SHOWS, "kinds": ("labels", "data")}
    rule = replace(rule, no_noise=NO_NOISE, sums=how.sums, same_steps=how.same_steps, shows=shows)
    return grouped(NAME, rule)


def kinds_of_data(
    client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]
) -> Upload:
    """Whether this client's targets are classes, and its inputs quantities."""
    x, y = client.train.x, client.train.y
    classes = not y.is_floating_point()
    quantities = x.is_floating_point() or x.dtype == torch.uint8
    return Upload(metrics={"labels": float(classes), "data": float(quantities)})


@dataclass(frozen=True, eq=False)
class _Outcome:
    """The answer that is used, and the samples and notes of the other representations."""

    answer: ProbeAnswer
    other_samples: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)


def _ask_everything(fed: Federation, probe: Probe, setup: Setup) -> _Outcome:
    """TrialMode every representation in turn; the first that finds groups counts."""
    replies = fed.gather([Order(c, "kinds") for c in setup.clients])
    possible = {k: all(r.metrics[k] for r in replies) for k in IMPOSSIBLE}
    answers: dict[str, ProbeAnswer] = {}
    for by in EVERY:
        if not possible.get(by, True):
            continue
        probe = replace(probe, by=by, fallback=False)
        answers[by] = probing.ask(fed, probe, setup.start, setup.clients)
        if probe.trains:  # the whole model needs the same number of steps
            probe = replace(probe, steps=answers[by].memory["steps"])
    chosen = next((a for a in answers.values() if a.evidence.groups > 1), answers[EVERY[0]])
    labels = _on_common_clients(list(answers.values()))
    groupings = dict(zip(answers, labels, strict=True))
    main = chosen.notes["by"]
    shown: dict[str, Any] = {}
    for by in EVERY:
        if by in answers:
            agreement = adjusted_rand(groupings[main], groupings[by])
            shown[by] = {**answers[by].notes, "agreement": round(agreement, 4)}
        else:
            shown[by] = {"impossible": IMPOSSIBLE[by]}
    notes = {"representations": shown, "meaning": meaning(groupings)}
    notes |= answers["model"].layer_notes
    others = sum(a.notes["samples"] for a in answers.values() if a is not chosen)
    return _Outcome(chosen, others, notes)


def _drawn_again(
    fed: Federation, answer: ProbeAnswer, setup: Setup, seeds: int
) -> list[ProbeAnswer]:
    """Repeat the probe with other halves of the data, and the same number of steps."""
    probe = Probe(answer.memory["by"], answer.memory["steps"] or "auto", fallback=False)  # 0: none
    probes = [replace(probe, draw=draw) for draw in range(1, seeds)]
    return [probing.ask(fed, again, setup.start, setup.clients) for again in probes]


def _placed(
    fed: Federation, answer: ProbeAnswer, clients: Sequence[ClientId]
) -> dict[ClientId, int]:
    """The group of each client; one too small for two halves joins the nearest group."""
    labels = [int(g) for g in answer.evidence.labels]
    placed = dict(zip(answer.clients, labels, strict=True))
    too_small = [c for c in clients if c not in placed]
    if answer.evidence.groups == 1:
        return placed | dict.fromkeys(too_small, ROOT)
    if too_small and fed.min_group > 1:  # clients are asked only once: join the largest group
        placed |= dict.fromkeys(too_small, Counter(labels).most_common(1)[0][0])
    elif too_small:
        centres = probing.centres(answer.places, labels)
        placed |= probing.place(fed, answer.memory, centres, too_small)
    return placed


def stability(draws: Sequence[ProbeAnswer]) -> dict[str, Any]:
    """How far the groupings from several divisions into halves agree, as JSON values.

    ``agreement`` is the mean adjusted Rand index over all pairs, ``same`` the number of draws with
    the same grouping as the first, itself included.
    """
    labels = _on_common_clients(draws)
    pairs = [adjusted_rand(one, two) for one, two in combinations(labels, 2)]
    return {
        "draws": len(draws),
        "groups": [a.evidence.groups for a in draws],
        "agreement": round(sum(pairs) / len(pairs), 4) if pairs else 1.0,
        "same": sum(adjusted_rand(labels[0], other) == 1.0 for other in labels),
    }


def _on_common_clients(answers: Sequence[ProbeAnswer]) -> list[list[int]]:
    """The groups of the clients that are in all of these answers, in the same order."""
    common = set.intersection(*(set(a.clients) for a in answers))
    return [
        [int(g) for c, g in zip(a.clients, a.evidence.labels, strict=True) if c in common]
        for a in answers
    ]


def meaning(groupings: Mapping[str, Sequence[int]]) -> str:
    """Explain in a sentence how clients differ, from the groups that each representation gives.


    'Models differ by group, and inputs and freq'
    """
    several = {by: list(g) for by, g in groupings.items() if len(set(g)) > 1}
    trained = next((g for by, g in several.items() if by not in IMPOSSIBLE), None)
    labels, data = several.get("labels"), several.get("data")
    compared = [word for by, word in _HELD.items() if by in groupings]
    if not several:
        return "No representation finds groups: as far as these data can tell, clients are alike."
    if trained is None and labels is None:
        return (
            "The inputs differ between groups (covariate shift), but models trained on them do "
            "not: one model can serve all clients."
        )
    if trained is None:
        return (
            "The groups hold different labels (label skew), but models trained on them do not "
            "differ by group: one model may serve all clients."
        )
    if labels is not None and explains(labels, trained):
        return (
            "The groups hold different labels (label skew): models differ by group because the "
            "frequencies of labels do."
        )
    if labels is None and data is not None and explains(data, trained):
        although = " although labels do not" if "labels" in groupings else ""
        return (
            "The inputs differ between groups (covariate shift), as with another sensor, site or "
            f"orientation: models differ by group{although}."
        )
    if labels is None and data is None and not compared:
        return "Models differ by group; why they do was not compared."
    if labels is None and data is None:
        return (
            f"Models differ by group, and {' and '.join(compared)} show no groups by themselves. "
            "Either the relation of inputs to labels differs (concept shift), as when labels are "
            "named differently, or inputs differ in a way that their main directions do not show."
        )
    kinds = " and ".join(k for k, g in (("labels", labels), ("inputs", data)) if g is not None)
    return (
        f"Models, and {kinds} by themselves, form different groups: clients differ in more than "
        "one way. Look at each grouping before you choose one."
    )


def explains(coarse: Sequence[int], fine: Sequence[int]) -> bool:
    """Whether two groupings are the same, or the second one subdivides the first.

    The latter happens, for example, because the subspace of images does not change when they are
    turned upside down.

    >>> explains([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3])
    True
    >>> explains([0, 1, 0, 1], [0, 0, 1, 1])
    False
    """
    if adjusted_rand(coarse, fine) >= SAME:
        return True
    if 2 * len(set(fine)) > len(fine):  # that many small groups would fit any coarse grouping
        return False
    inside = Counter(zip(fine, coarse, strict=True))
    largest: dict[int, int] = {}
    for (group, _), count in inside.items():
        largest[group] = max(count, largest.get(group, 0))
    return sum(largest.values()) >= MOSTLY * len(fine)
