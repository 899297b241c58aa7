"""Encoding of texts as sequences of word numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from coterie.data.raw import Array

PAD, UNKNOWN = 0, 1
SPECIAL = ("<pad>", "<unknown>")
_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Split a text into lower-case words and single punctuation marks.

    >>> words("Don't stop!")
    ['don', "'", 't', 'stop', '!']
    """
    return _WORD.findall(text.lower())


def build_vocabulary(texts: Iterable[str], most: int) -> tuple[str, ...]:
    """The tokens for padding and unknown words, then the most frequent words: ``most`` entries.

    Equally frequent words are in alphabetical order.

    >>> build_vocabulary(["b a b", "c"], most=4)
    ('<pad>', '<unknown>', 'b', 'a')
    """
    counts = Counter(word for text in texts for word in words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return (*SPECIAL, *ranked[: most - len(SPECIAL)])


def encode(texts: Sequence[str], vocabulary: Sequence[str], length: int) -> Array:
    """Encode texts as word numbers of shape (texts, length), truncated or padded.

    >>> encode(["b d"], ("<pad>", "<unknown>", "b"), 3).tolist()
    [[2, 1, 0]]
    """
    number = {word: i for i, word in enumerate(vocabulary)}
    rows = np.full((len(texts), length), PAD, dtype=np.int64)
    for row, text in zip(rows, texts, strict=True):
        numbers = [number.get(word, UNKNOWN) for word in words(text)[:length]]
        row[: len(numbers)] = numbers
    return rows
