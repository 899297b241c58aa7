"""Captions of the pictures of the evidence for groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.by_layer import apart, layers_of, layers_that_fit
from coterie.report.figures.evidence import map_of
from coterie.report.reading import Reading
from coterie.report.words import count


def noted_last(reading: Reading, key: str) -> Mapping[str, Any]:
    """The notes of the last event that notes this key; a ``ConfigError`` if none does."""
    for event in reversed(reading.events):
        notes = event.get("notes") or {}
        if notes.get(key) is not None:
            found: Mapping[str, Any] = notes
            return found
    raise ConfigError(f"{reading.name}: {reading.method} recorded no '{key}'")


def evidence(reading: Reading) -> str:
    """The caption of the errors by number of groups."""
    evidence_notes = noted_last(reading, "evidence")["evidence"]
    chosen, errors = evidence_notes["groups"], evidence_notes["errors"]
    text = (
        "How well groups made from one half of the clients' data predict the other half, for each "
        "number of groups; bars are standard errors of the difference from the lowest"
    )
    if chosen == 1:
        return f"{text}. One group was chosen: {evidence_notes['why']}."
    share = errors[str(chosen)] / errors["1"]
    kappa = evidence_notes["kappa"][str(chosen)]
    caveat = "" if evidence_notes["decisive"] else "; other numbers are about as good"
    return (
        f"{text}. {chosen} groups leave {share:.0%} of the error of one mean for all; the other "
        f"halves fall into the same groups with κ = {kappa:.2f}{caveat}."
    )


def client_map(reading: Reading) -> str:
    """The caption of the map of clients."""
    plane = map_of(noted_last(reading, "evidence"))
    between = sum(c < 0 for c in plane.certainty)
    clients_between = (
        "no client is"
        if not between
        else f"{count(between, 'client')} {'is' if between == 1 else 'are'}"
    )
    return (
        f"{len(plane.clients)} clients in {count(len(set(plane.groups)), 'group')}; similar "
        f"clients are close together. The plane shows {plane.share:.0%} of their differences. "
        "Small, "
        f"pale dots are clients whose group is uncertain; {clients_between} between two groups."
    )


def by_layer(reading: Reading, groups: Sequence[Any]) -> str:
    """The caption of the distances in each layer."""
    clients, layers = layers_of(noted_last(reading, "layer_distances"))
    drawn = layers_that_fit(list(layers))
    left_out = len(layers) - len(drawn)
    subset = f", {len(drawn)} of {len(layers)} of them" if left_out else ""
    text = (
        f"Distances between the models of {len(clients)} clients after the training for the "
        f"comparison, layer by layer{subset}; each layer has its own scale"
    )
    means = {name: apart(clients, layers[name], groups) for name in drawn}
    ratios = {n: between / inside for n, (inside, between) in means.items() if inside > 0}
    ratios = {n: r for n, r in ratios.items() if r == r}
    if not ratios:
        return f"{text}. There are not two groups to compare."
    ratio_list = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    best = max(ratios, key=lambda n: ratios[n])
    return (
        f"{text}. Ratio of the mean distance between groups to that inside them, which is 1 where "
        "a "
        f"layer does not separate them: {ratio_list}. {best} separates them best."
    )
