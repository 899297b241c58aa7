"""A malicious server against real members, through their messages: what it must not learn.

The server is our own with its checks taken out; members are as ``coterie join`` starts them.
"""

import math

import pytest

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.channel.privacy import secure_sums as secure
from coterie.deploy import serve as serving
from coterie.deploy.member import FederationMember
from coterie.errors import CoterieError, TrainingError
from coterie.experiment import experiment as experiments
from faked_grid import Federation, read, tree

SECURE = {"secure": True, "randomness": "system"}


def federation(place, name="fedavg", privacy=SECURE, count=4, **method):
    made = tree(
        count,
        data={"samples": 25 * count},
        run={"rounds": 1},
        method={"name": name, **method},
        privacy=privacy,
    )
    return Federation(place, made, secure=True)


def advertised(fed):
    """Who has sent keys for a sum: who would take part in one."""
    posts = [p for p in fed.grid.posts if p.kind == "order" and p.answer is not None]
    return {p.client for p in posts if "slot" in read(p.answer)["body"].get("beside", {})}


# --- V1: keys and noise that follow the server's seed ---------------------------------------------


@pytest.mark.parametrize(
    "privacy",
    [
        {"secure": True, "randomness": "simulated"},
        {"noise": 1.0, "mechanism": "local", "randomness": "simulated"},
    ],
)
def test_members_take_no_keys_and_no_noise_from_a_seed_that_the_server_knows(
    privacy, tmp_path, monkeypatch
):
    fed = federation(tmp_path, privacy=privacy)
    monkeypatch.setattr(serving, "_check", lambda config: None)
    with pytest.raises(CoterieError):
        fed.serve()
    for said in (fed.said, fed.heard):  # on both sides
        assert any("set privacy.randomness = system" in line for line in said)
    orders = [p for p in fed.grid.posts if p.kind == "order"]
    assert {read(p.answer)["kind"] for p in orders} <= {"missing", "stranger"}


def test_an_honest_server_refuses_it_before_anybody_is_asked(tmp_path):
    fed = federation(tmp_path, privacy={"noise": 1.0, "randomness": "simulated"})
    with pytest.raises(CoterieError, match=r"set privacy\.randomness = system"):
        fed.serve()
    assert not fed.grid.posts


# --- V3: the same change of different models ------------------------------------------------------


def test_members_take_no_changes_of_models_that_may_differ(tmp_path, monkeypatch):
    fed = federation(tmp_path)
    fed.config["wire"] = {"down": "qsgd"}
    monkeypatch.setattr(serving, "_check", lambda config: None)
    honest, builds, at_member = experiments.check_privacy, FederationMember._runtime_of, []

    def runtime_of(member, *given):
        at_member.append(member)
        try:
            return builds(member, *given)
        finally:
            at_member.pop()

    def check(*given):  # the server's own is taken out
        return honest(*given) if at_member else None

    monkeypatch.setattr(FederationMember, "_runtime_of", runtime_of)
    monkeypatch.setattr(experiments, "check_privacy", check)
    with pytest.raises(CoterieError):
        fed.serve()
    assert sum("wire.down = 'qsgd'" in line for line in fed.heard) == 4
    assert not advertised(fed)


@pytest.mark.parametrize(
    ("privacy", "says"),
    [
        ({}, "takes part only in runs with secure sums"),
        ({**SECURE, "same_orders": False}, "only if all its members are sent the same order"),
    ],
)
def test_who_joins_with_secure_takes_no_part_in_a_weaker_run(privacy, says, tmp_path):
    fed = federation(tmp_path, privacy=privacy)
    for member in fed.grid.members.values():
        member.secure = True  # as `coterie join --secure` has it
    with pytest.raises(CoterieError):
        fed.serve()
    for said in (fed.said, fed.heard):
        assert any(says in line for line in said)
    assert not advertised(fed)


# --- V4: a metric read as the name of a slot ------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "ifca"])
def test_no_metric_leaves_a_member_as_the_name_of_its_slot(name, tmp_path, monkeypatch):
    more = {"k": 2} if name == "ifca" else {}
    fed = federation(tmp_path, name, {**SECURE, "small_groups": "skip"}, **more)
    honest = secure._Call.tells

    def tells(call, client, into):
        told = honest(call, client, into)
        told.pop("slot", None)
        return {**told, "chosen": "loss"}

    monkeypatch.setattr(secure._Call, "tells", tells)
    (told,) = fed.serve().history
    assert "abandoned" in told
    assert not advertised(fed)
    asked = [line for line in fed.heard if "by 'loss', but clients of method" in line]
    assert len(asked) == 4


def test_a_slot_that_is_chosen_is_one_of_those_offered(tmp_path, monkeypatch):
    from coterie.channel.privacy.client import ClientTerms
    from coterie.channel.privacy.client_sums import ClientSums
    from coterie.methods.clustered import ifca

    def chosen(value, offered):
        sealing = ClientSums(ClientTerms(None, 0, tmp_path, None, None, ifca(k=3)))
        upload = type("Upload", (), {"metrics": {"slot": value}})
        return sealing._chosen(0, upload, dict.fromkeys(map(str, range(offered))), "slot")

    assert [chosen(float(n), 3) for n in range(3)] == [0, 1, 2]
    for value in (3.0, -1.0, 0.25, 1e300, math.nan, math.inf):
        with pytest.raises(TrainingError, match="has chosen slot"):
            chosen(value, 3)


# --- V5: after a refusal --------------------------------------------------------------------------


def test_a_sum_that_a_member_refused_is_over_for_it(tmp_path, monkeypatch):
    """The server names too few survivors, and then as many as there should be."""
    fed = federation(tmp_path)
    honest, answers = secure.Secure._carry, []

    def carry(channel, call, step, running, said):
        if step != "survivors":
            return honest(channel, call, step, running, said)
        wrong = {slot: dict.fromkeys(m, b"\x00" * 8) for slot, m in said.items()}
        answers.append(honest(channel, call, step, running, wrong))
        answers.append(honest(channel, call, step, running, said))
        return answers[-1]

    monkeypatch.setattr(secure.Secure, "_carry", carry)
    (told,) = fed.serve().history
    assert "abandoned" in told
    for replies in answers:
        assert len(replies) == 4
        assert all("refused" in a.beside and not a.arrays for a in replies)
    first, second = ([a.beside["refused"] for a in replies] for replies in answers)
    assert first == second
    assert sum("refused to go on with a sum" in line for line in fed.heard) >= 4
    secrets = [p for p in tmp_path.rglob("*.session") if b"member" in p.read_bytes()]
    assert not secrets
