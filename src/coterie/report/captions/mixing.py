"""Captions of the pictures of user-centric mixing."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.report.captions.evidence import noted_last
from coterie.report.figures.mixing import mean, mixing_terms_of, terms_by_kind
from coterie.report.reading import Reading
from coterie.report.words import count

MOST = 6  # runs whose numbers are given


def mixing_terms(reading: Reading) -> str:
    """The caption of effective samples and discrepancies."""
    terms = mixing_terms_of(noted_last(reading, "mixing_terms"), reading.groups)
    (worth, gap), (alone, _) = mean(terms.own), mean(terms.alone)
    total, far = mean(terms.together)
    text = (
        f"With its own weights, a client's mixture is worth {worth:,.0f} samples on average; the "
        f"client alone has {alone:,.0f}, all clients together have {total:,.0f}. The mean "
        "discrepancy to the clients mixed "
        f"in is {gap:.3g}"
    )
    if far > 0:
        text += f", {gap / far:.0%} of the discrepancy with FedAvg's weights ({far:.3g})"
    if terms.streams:
        text += (
            f"; with the weights of {count(len(terms.streams), 'stream')} a mixture is worth "
            f"{terms.used[0]:,.0f} samples, at {terms.used[1]:.3g}"
        )
    return f"{text}. Down and to the right is better."


def compared(readings: Sequence[Reading]) -> str:
    """The caption of the same for several runs."""
    entries = []
    for title, runs in terms_by_kind(readings).items():
        worth, gap = mean([t.share(t.used) for t in runs])
        entries.append((worth, f"{title} {worth:.0%} at {gap:.0%}"))
    entries.sort(key=lambda pair: -pair[0])
    rest = f"; and {len(entries) - MOST} more" if len(entries) > MOST else ""
    return (
        "The mean worth of a client's mixture as a share of all samples, and its discrepancy as a "
        "share of that with FedAvg's weights: "
        f"{'; '.join(text for _, text in entries[:MOST])}{rest}. Down and to the right is better."
    )
