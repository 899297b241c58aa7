"""A real federation whose groups are given: a file by the names of its members."""

import json

import pytest

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.deploy.terms import travelling
from coterie.errors import ConfigError
from faked_grid import Federation, assert_models, loop, tree
from support import Stop, stop_after

NAMED = {"site0": "Nord", "site1": "Süd", "site2": "Nord"}


def known(groups, **tables):
    return tree(method={"name": "known-groups", "groups": groups}, **tables)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "groups.json"
    path.write_text(json.dumps({"groups": NAMED}))
    return str(path)


def late(fed, client, round=1):
    fed.grid.away = {client}

    def watch(event):
        if event["round"] == round:
            fed.grid.away = set()

    return watch


def test_members_are_grouped_by_their_names(tmp_path, file):
    fed = Federation(tmp_path, known(file), secure=True)
    result = fed.serve()
    assert result.groups == {0: "Nord", 1: "Süd", 2: "Nord"}
    assert_models(fed, loop(known(["Nord", "Süd", "Nord"])))
    sent = "".join(str(post.message.content) for post in fed.grid.posts)
    assert "known-groups" in sent
    for word in ("site2", file):  # a member is told neither who is where, nor of the server's files
        assert word not in sent


def test_it_goes_on_when_the_file_has_changed_or_gone(tmp_path, file):
    fed = Federation(tmp_path, known(file), secure=True)
    with pytest.raises(Stop):
        fed.serve(watch=stop_after(1))
    (tmp_path / "groups.json").write_text(json.dumps(dict.fromkeys(NAMED, "all")))
    fed.restart()
    with pytest.raises(Stop):
        fed.serve(watch=stop_after(2))
    (tmp_path / "groups.json").unlink()
    fed.restart()
    assert fed.serve().groups == {0: "Nord", 1: "Süd", 2: "Nord"}
    assert_models(fed, loop(known(["Nord", "Süd", "Nord"])))
    fed.config = known({**NAMED, "site2": "Süd"})
    with pytest.raises(ConfigError, match="serves another configuration"):
        fed.serve()


def test_a_member_that_comes_late_joins_its_group(tmp_path, file):
    fed = Federation(tmp_path, known(file, run={"rounds": 4}), secure=True)
    result = fed.serve(expect=2, watch=late(fed, 2))
    assert [e["cohort"] for e in result.history] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert result.groups == {0: "Nord", 1: "Süd", 2: "Nord"}


def test_members_that_the_file_does_not_name_are_said_before_anything_is_trained(tmp_path):
    fed = Federation(tmp_path, known({"site0": "a", "site1": "b", "site9": "a"}), secure=True)
    with pytest.raises(ConfigError) as told:
        fed.serve(expect=2, watch=late(fed, 2))
    assert "client 2 (site2) is missing; 'site9' is not a known client" in str(told.value)
    assert fed.grid.orders() == []


def test_one_that_nobody_has_named_stays_outside(tmp_path):
    """Without keys the server does not know who will come."""
    fed = Federation(tmp_path, known({"0": "a", "1": "b"}, run={"rounds": 4}))
    result = fed.serve(expect=2, watch=late(fed, 2))
    assert [e["cohort"] for e in result.history] == [[0, 1]] * 4
    assert any("known-groups cannot admit client 2: its group is not known" in t for t in fed.said)


def test_ids_that_nobody_has_need_no_group(tmp_path):
    """Without keys, clients 0 and 2 may come, and no 1."""
    fed = Federation(tmp_path, known({"0": "a", "2": "b"}))
    fed.grid.away = {1}
    assert fed.serve(expect=2).groups == {0: "a", 2: "b"}


def test_a_column_is_refused_with_what_to_do(tmp_path):
    fed = Federation(tmp_path, known("site"))
    with pytest.raises(ConfigError, match=r"does not know its clients' metadata. Name a file"):
        fed.serve()
    assert fed.grid.posts == []


def test_what_travels_names_no_group_and_no_file():
    groups = {"method": {"name": "known-groups", "groups": NAMED}}
    assert travelling(groups) == {"method": {"name": "known-groups", "groups": "group"}}
    joined = {"name": "known-groups+ditto", "known-groups": {"groups": "/etc/x.json"}, "mu": 1.0}
    assert travelling({"method": joined})["method"] == {
        "name": "known-groups+ditto",
        "known-groups": {"groups": "group"},
        "mu": 1.0,
    }
    assert travelling({"method": {"name": "mine", "groups": "x"}})["method"]["groups"] == "x"
    assert travelling({"data": {"metadata": "clients.csv"}}) == {"data": {}}
    assert travelling({"data": {"metadata": ["site"]}}) == {"data": {"metadata": ["site"]}}


def test_the_question_about_groups_is_answered_as_on_the_loop(tmp_path):
    method = {"name": "group-evidence", "by": "all", "seeds": 2, "trial": "always"}
    settings = tree(method=method, run={"rounds": 9})
    fed = Federation(tmp_path, settings)
    served, wanted = fed.serve(), loop(settings)
    assert served.begun["notes"] == wanted.begun["notes"]
    assert served.history[-1]["notes"] == wanted.history[-1]["notes"]
    assert "losses" in served.history[-1]["notes"]["verdict"]
    assert served.rounds == wanted.rounds == 3  # it ends by itself
    assert_models(fed, wanted)
