"""Scores over clients, some of whom say less than others."""

from coterie.results.evaluation import summarise

WHOLE = {"test_accuracy": 0.5, "test_count": 10.0, "test_loss": 0.3, "val_count": 4.0}


def test_a_client_without_the_score_that_is_judged_by_does_not_count():
    alone = summarise({0: WHOLE}, "accuracy")
    assert summarise({0: WHOLE, 1: {"test_count": 90.0, "test_loss": 9.0}}, "accuracy") == alone


def test_a_further_score_is_averaged_over_those_who_tell_it():
    told = {**WHOLE, "test_f1": 0.8}
    assert summarise({0: told, 1: WHOLE}, "accuracy")["f1"] == 0.8


def test_validation_scores_that_are_not_told_are_no_reason_to_fail():
    assert "val" not in summarise({0: WHOLE}, "accuracy")
    assert summarise({0: WHOLE, 1: {**WHOLE, "val_accuracy": 0.7}}, "accuracy")["val"] == 0.7
