"""What is to be seen in the pictures of the evidence for groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.by_layer import apart, layers_of, shown
from coterie.report.figures.evidence import map_of
from coterie.report.reading import Reading
from coterie.report.words import count


def noted_last(reading: Reading, key: str) -> Mapping[str, Any]:
    """The notes of the last event that has this key in them; a sentence if none has."""
    for event in reversed(reading.events):
        notes = event.get("notes") or {}
        if notes.get(key) is not None:
            found: Mapping[str, Any] = notes
            return found
    raise ConfigError(f"{reading.name}: {reading.method} noted no '{key}'")


def evidence(reading: Reading) -> str:
    """Of the errors by number of groups."""
    told = noted_last(reading, "evidence")["evidence"]
    chosen, errors = told["groups"], told["errors"]
    text = (
        "How well the groups of one half of clients' data predict the other half, for each number "
        "of groups; bars are standard errors of the difference from the lowest"
    )
    if chosen == 1:
        return f"{text}. One group was chosen: {told['why']}."
    share = errors[str(chosen)] / errors["1"]
    kappa = told["kappa"][str(chosen)]
    sure = "" if told["decisive"] else "; other numbers are about as good"
    return (
        f"{text}. {chosen} groups leave {share:.0%} of one mean's error; the other halves fall "
        f"into the same groups with κ = {kappa:.2f}{sure}."
    )


def client_map(reading: Reading) -> str:
    """Of the map."""
    there = map_of(noted_last(reading, "evidence"))
    between = sum(c < 0 for c in there.certainty)
    sits = (
        "no client sits" if not between else f"{count(between, 'client')} sit{'s' * (between == 1)}"
    )
    return (
        f"{len(there.clients)} clients in {count(len(set(there.groups)), 'group')}; alike ones are "
        f"near each other. The plane shows {there.share:.0%} of how they differ. Small, pale: "
        f"an uncertain group; {sits} between two groups."
    )


def by_layer(reading: Reading, groups: Sequence[Any]) -> str:
    """Of the distances in each layer."""
    clients, layers = layers_of(noted_last(reading, "layer_distances"))
    drawn = shown(list(layers))
    left_out = len(layers) - len(drawn)
    some = f", {len(drawn)} of {len(layers)} of them" if left_out else ""
    text = (
        f"How far apart the models of {len(clients)} clients are after training for the "
        f"comparison, layer by layer{some}; each layer has its own scale"
    )
    means = {name: apart(clients, layers[name], groups) for name in drawn}
    ratios = {n: between / inside for n, (inside, between) in means.items() if inside > 0}
    ratios = {n: r for n, r in ratios.items() if r == r}
    if not ratios:
        return f"{text}. There are no groups to tell apart."
    told = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    best = max(ratios, key=lambda n: ratios[n])
    return (
        f"{text}. Mean distance between groups over that inside them, 1 if a layer does not tell "
        f"them apart: {told}. {best} tells them apart best."
    )
