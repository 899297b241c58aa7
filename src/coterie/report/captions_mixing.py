"""What is to be seen in the pictures of user-centric mixing."""

from __future__ import annotations

from coterie.report.captions_evidence import noted_last
from coterie.report.figures.mixing import mean, terms_of
from coterie.report.reading import Reading
from coterie.report.words import count


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
        shared = mean([terms.streams[k] for k in terms.labels if k is not None])
        text += (
            f"; with the weights of {count(len(terms.streams), 'stream')} a mixture is worth "
            f"{shared[0]:,.0f} samples, at {shared[1]:.3g}"
        )
    return f"{text}. Right and down is better."
