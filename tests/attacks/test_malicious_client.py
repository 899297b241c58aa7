"""A malicious client among honest ones, before a real server: it costs itself, not the others."""

import json

import pytest

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from flwr.app import ConfigRecord, RecordDict

from faked_grid import Federation, assert_models, tree

SECURE = {"secure": True, "randomness": "system", "threshold": 0.6}


def federation(place, keys=None):
    made = tree(4, data={"samples": 100}, run={"rounds": 1}, privacy=SECURE)
    return Federation(place, made, secure=True, keys=keys)


def telling(beside):
    """Client 1 tells something else beside the keys of its first answer."""

    def change(post, content):
        head = dict(content["head"])
        told = json.loads(head["header"]) if head["kind"] == "order" else {}
        if post.client != 1 or "form" not in told.get("body", {}).get("beside", {}):
            return content
        told["body"]["beside"] = beside(told["body"]["beside"])
        head["header"] = json.dumps(told).encode()
        return RecordDict({"head": ConfigRecord(head), "arrays": content["arrays"]})

    return change


LIES = {
    "no form": lambda told: {k: v for k, v in told.items() if k != "form"} | {"form": None},
    "a form of numbers": lambda told: {**told, "form": [1, 2]},
    "a function for a type": lambda told: {**told, "form": [["model", None, [3], "load"]]},
    "a huge shape": lambda told: {**told, "form": [["model", None, [2**62, 2**62], "float32"]]},
    "a negative shape": lambda told: {**told, "form": [["model", None, [-3], "float32"]]},
    "layers that there are not": lambda told: {**told, "form": [["m", ["x"], [3], "float32"]]},
    "other arrays than the others": lambda told: {**told, "form": [["x", None, [3], "float32"]]},
    "a list as its slot": lambda told: {**told, "slot": [0]},
    "a number as its metrics": lambda told: {**told, "metrics": 7},
    "a million metrics": lambda told: {**told, "metrics": [f"m{n}" for n in range(10**6)]},
    "a list in place of all": lambda told: ["slot"],
}


@pytest.mark.parametrize("lie", LIES)
def test_nonsense_about_ones_part_of_a_sum_leaves_the_others_their_sum(lie, tmp_path):
    fed = federation(tmp_path)
    fed.grid.change = telling(LIES[lie])
    (event,) = fed.serve().history
    assert "abandoned" not in event
    assert set(event["rejected"]) == {"1"}
    honest = federation(tmp_path / "honest", keys=fed.keys)
    honest.grid.faults[1, "1.0"] = "lose"  # the same round without it
    honest.serve()
    model, other = fed.model(0), honest.model(0)
    assert all((model[name] == other[name]).all() for name in model)


def test_an_answer_in_anothers_name_is_not_used_and_is_told(tmp_path):
    fed = Federation(tmp_path, tree(3, run={"rounds": 1}))
    fed.grid.faults[1, "1.0"] = "wrong node"
    (event,) = fed.serve().history
    assert event["lost"] == 1
    assert "client 1: an answer in its name came from another node" in fed.said
    honest = Federation(tmp_path / "honest", tree(3, run={"rounds": 1}))
    honest.grid.faults[1, "1.0"] = "lose"
    assert_models(fed, honest.serve(), [0])
