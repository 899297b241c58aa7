"""The reason for a cut: the sentence matches what is drawn and names the best cut."""

import numpy as np
import pytest

from coterie.clustering import agglomerate, best_cut
from coterie.methods.tree_cuts import chosen_because, cut_tree
from coterie.report import figures
from coterie.report.captions import groups as captions_groups
from coterie.report.reading import Reading


def apart(groups, inside, between, far):
    """Distances between clients in these groups; the last group is far from all others."""
    last = max(groups)
    return np.array(
        [
            [
                0.0 if i == j else inside if a == b else far if last in (a, b) else between
                for j, b in enumerate(groups)
            ]
            for i, a in enumerate(groups)
        ]
    )


# Three clients 0.84 apart and one that is 1 from each. The three have (1 − 0.84)/1 = 0.16, the one
# alone 0: over clients 3·0.16/4 = 0.12, over groups 0.16/2 = 0.08. Three groups have 0.
OUTLIER = apart([0, 0, 0, 1], 0.84, 1.0, 1.0)
# Two pairs, 0.82 inside and 1 between, and one client that is 1.16 from all. Into three groups:
# (1 − 0.82)/1 = 0.18 for the pairs, over clients 4·0.18/5 = 0.144, over groups 2·0.18/3 = 0.12.
# Into two: inside (0.82 + 2·1)/3 = 0.94, so (1.16 − 0.94)/1.16 = 0.18966; over clients 4/5 of that,
# 0.15172, over groups a half, 0.0948. Into four: a pair has 0.18, over clients 2·0.18/5 = 0.072.
PAIRS = apart([0, 0, 1, 1, 2], 0.82, 1.0, 1.16)
# As the first, but 0.96 apart: 3·0.04/4 = 0.03.
ALIKE = apart([0, 0, 0, 1], 0.96, 1.0, 1.0)
# Two pairs, 1 inside and 10 between: 0.9 each; three groups have 2·0.9/4 = 0.45.
CLEAR = apart([0, 0, 1, 1], 1.0, 10.0, 10.0)
TWO = apart([0, 1], 0.0, 3.0, 3.0)
SAME = np.zeros((5, 5))

WHY = {
    "outlier": (
        OUTLIER,
        {2: 0.12, 3: 0.0},
        1,
        "one group: the best cut, into 2 groups, has silhouette 0.120, but 0.1 or less as a mean "
        "over groups",
    ),
    "pairs": (
        PAIRS,
        {2: 0.15172, 3: 0.144, 4: 0.072},
        3,
        "silhouette 0.144 with 3 groups, the best that counts: 2 have 0.152, but 0.1 or less as a "
        "mean over groups",
    ),
    "alike": (
        ALIKE,
        {2: 0.03, 3: 0.0},
        1,
        "one group: no silhouette is above 0.1, the best is 0.030 with 2 groups",
    ),
    "clear": (CLEAR, {2: 0.9, 3: 0.45}, 2, "silhouette 0.900 with 2 groups, the best of all cuts"),
    "two": (TWO, {}, 1, "one group: no cut has a silhouette, as fewer than three clients differ"),
    "same": (SAME, {}, 1, "one group: no cut has a silhouette, as fewer than three clients differ"),
}


@pytest.mark.parametrize("name", WHY)
def test_the_reason_names_the_cut_that_is_the_best(name):
    distances, scores, groups, sentence = WHY[name]
    best = best_cut(distances, agglomerate(distances))
    assert best.scores == pytest.approx(scores, abs=1e-5)
    assert len(set(best.labels)) == groups
    assert chosen_because(best) == sentence


@pytest.mark.parametrize("name", ["outlier", "pairs", "clear"])
def test_the_picture_its_caption_and_the_reason_agree(name):
    distances, _, _, sentence = WHY[name]
    _, notes = cut_tree(range(len(distances)), distances, "average", "auto")
    event = {"round": 0, "event": "init", "notes": notes}
    caption = captions_groups.silhouette(Reading("r", "running", events=[event]))
    score = {"outlier": "0.120", "pairs": "0.152", "clear": "0.900"}[name]
    assert caption == (f"2 groups have the highest silhouette, {score}. The choice: {sentence}.")
    drawn = figures.silhouette(notes)
    assert f"highest: 2 groups, {score}" in [trace.name for trace in drawn.data]
    assert drawn.layout.title.subtitle.text == sentence
    assert sentence in captions_groups.dendrogram(Reading("r", "running", events=[event]))
