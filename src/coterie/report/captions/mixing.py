"""What is to be seen in the pictures of user-centric mixing."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.report.captions.evidence import noted_last
from coterie.report.figures.mixing import mean, terms_by_kind, terms_of
from coterie.report.reading import Reading
from coterie.report.words import count

MOST = 6  # runs whose numbers are said


def mixing_terms(reading: Reading) -> str:
    """Of effective samples and discrepancies."""
    terms = terms_of(noted_last(reading, "mixing_terms"), reading.groups)
    (worth, gap), (alone, _) = mean(terms.own), mean(terms.alone)
    total, far = mean(terms.together)
    text = (
        f"By its own weights a client's mixture is worth {worth:,.0f} samples on average: alone it "
        f"has {alone:,.0f}, all together have {total:,.0f}. The mean discrepancy to those mixed in "
        f"is {gap:.3g}"
    )
    if far > 0:
        text += f", {gap / far:.0%} of that with FedAvg's weights ({far:.3g})"
    if terms.streams:
        text += (
            f"; with the weights of {count(len(terms.streams), 'stream')} a mixture is worth "
            f"{terms.used[0]:,.0f} samples, at {terms.used[1]:.3g}"
        )
    return f"{text}. Right and down is better."


def compared(readings: Sequence[Reading]) -> str:
    """Of several runs' terms."""
    told = []
    for title, runs in terms_by_kind(readings).items():
        worth, gap = mean([t.share(t.used) for t in runs])
        told.append((worth, f"{title} {worth:.0%} at {gap:.0%}"))
    told.sort(key=lambda pair: -pair[0])
    rest = f"; and {len(told) - MOST} more" if len(told) > MOST else ""
    return (
        "What a client's mixture is worth on average, of all samples, at which part of the "
        "discrepancy that FedAvg's weights have: "
        f"{'; '.join(text for _, text in told[:MOST])}{rest}. Right and down is better."
    )
