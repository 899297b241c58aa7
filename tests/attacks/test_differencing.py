"""A malicious server that wants the sum of five and the sum of four of them: it gets one sum.

The server is our own with its checks taken out; members are as ``coterie join`` starts them.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.deploy.member import Member
from coterie.door.privacy.secure import Secure
from coterie.errors import Abandoned, CoterieError, TrainingError
from coterie.run.live import Live
from faked_grid import Federation, read, tree

VICTIM, COUNT = 4, 5
PRIVACY = {"secure": True, "randomness": "system"}


def federation(place, rounds=1, method="fedavg", **more):
    made = tree(
        COUNT,
        data={"samples": 25 * COUNT},
        run={"rounds": rounds},
        method={"name": method, **more},
        privacy=PRIVACY,
    )
    return Federation(place, made, secure=True)


def nearly(model):
    """A model with one number changed by one unit in the last place."""
    vector = model.vector.clone()
    vector[0] = torch.nextafter(vector[0], torch.tensor(9.0))
    return replace(model, vector=vector)


class Attack:
    """What the server does after each honest sum: a second one that it has no right to.

    ``asks(orders, into)`` makes other orders and slots of them, or gives None for no attack.
    """

    def __init__(self, monkeypatch, asks, round=None, at=0, before=lambda: None):
        self.sums, self.refused, honest = [], [], Secure.sums

        def sums(secure, orders, into, by_examples=True, noise=None):
            total = honest(secure, orders, into, by_examples, noise)
            if secure.door.round != at:
                return total
            before()
            # Another server, as it were: it remembers nothing of the sums before.
            other = Secure(secure.door, secure.privacy, secure.roster, secure.run, secure.method)
            now, secure.door.round = secure.door.round, at if round is None else round
            try:
                again, weights, alike = asks(orders, into)
                self.sums.append(honest(other, again, weights, by_examples ^ alike))
            except (Abandoned, TrainingError) as why:
                self.refused.append(str(why))
            finally:
                secure.door.round = now
            return total

        monkeypatch.setattr(Secure, "sums", sums)


def without_victim(orders, into):
    rest = [o for o in orders if o.client != VICTIM]
    return rest, {o.client: into[o.client] for o in rest}, False


def nearly_the_same(orders, into):
    rest, weights, alike = without_victim(orders, into)
    changed = {name: nearly(array) for name, array in rest[0].arrays.items()}
    return [replace(o, arrays=changed) for o in rest], weights, alike


def fewer_steps(orders, into):
    """Another order to all but the victim."""
    rest, weights, alike = without_victim(orders, into)
    return [replace(o, config={**o.config, "steps": 1}) for o in rest], weights, alike


def in_another_slot(orders, into):
    rest, _, alike = without_victim(orders, into)
    return rest, {o.client: {"other": 1.0} for o in rest}, alike


def with_other_weights(orders, into):
    """Everybody again, in another slot, the victim by a little less than the others."""
    weights = {o.client: {"other": 1.0 - 2**-16 * (o.client == VICTIM)} for o in orders}
    return orders, weights, False


def by_samples_no_more(orders, into):
    """The same clients again, each counting alike: most have as many samples."""
    return orders, {o.client: {"other": 1.0} for o in orders}, True


ATTACKS = (
    *(without_victim, nearly_the_same, fewer_steps),
    *(in_another_slot, with_other_weights, by_samples_no_more),
)


@pytest.mark.parametrize("asks", ATTACKS)
@pytest.mark.parametrize("restarted", [False, True], ids=["", "members restarted"])
def test_a_second_sum_of_the_same_round_is_refused(asks, restarted, tmp_path, monkeypatch):
    fed = federation(tmp_path)
    before = fed.restart if restarted else lambda: None
    attack = Attack(monkeypatch, asks, before=before)
    result = fed.serve()
    assert not attack.sums
    assert len(attack.refused) == 1
    assert "abandoned" not in result.history[0]  # the honest sum was made
    said = [line for line in fed.heard if "signed" in line or "counted otherwise" in line]
    assert {line.split("client ")[1][0] for line in said} >= {"0", "1", "2", "3"}


def test_a_method_that_declares_two_sums_does_not_get_two_sets_of_clients(tmp_path, monkeypatch):
    """FedClust's trial sums models, then scores: of the same clients, each counted alike."""
    fed = federation(tmp_path, method="fedclust", fallback=False)
    fed.config["privacy"] = {**PRIVACY, "reveal": "final-layer"}
    attack = Attack(monkeypatch, nearly_the_same)
    fed.serve()
    assert not attack.sums
    assert any("differs by 1 of its 4 members" in line for line in fed.heard)


@pytest.mark.parametrize("asks", [without_victim, nearly_the_same])
def test_a_round_before_the_last_one_signed_is_over(asks, tmp_path, monkeypatch):
    """Its training streams, and with the model of then its uploads, would be the same."""
    fed = federation(tmp_path, rounds=2)
    attack = Attack(monkeypatch, asks, round=0, at=1)
    fed.serve()
    assert not attack.sums
    assert any("has signed in round 2, and signs in none before it" in t for t in fed.heard)


# --- another run ------------------------------------------------------------------------------


def adverts(fed, since=0):
    """Who has sent keys for a sum."""
    posts = [p for p in fed.grid.posts[since:] if p.kind == "order" and p.answer is not None]
    return {p.client for p in posts if "slot" in read(p.answer)["body"].get("beside", {})}


def test_a_new_run_needs_the_owners_command_and_repeats_no_upload(tmp_path):
    """The server names runs: with the same seed and model, one more name would be enough."""
    fed = federation(tmp_path)
    fed.serve("first")
    models, posts = fed.model(0), len(fed.grid.posts)
    with pytest.raises(CoterieError):
        fed.serve("second")
    assert not adverts(fed, posts)
    for lines in (fed.heard, fed.said):  # on both sides
        assert any("only when its owner starts `coterie join` again" in line for line in lines)
    elsewhere = Member(tmp_path / "elsewhere", fed.sources[0], fed.who(0), "cpu", fed.heard.append)
    fed.grid.members[0] = elsewhere  # the record goes with the key, not with the folder
    with pytest.raises(CoterieError):
        fed.serve("third")
    assert not adverts(fed, posts)
    fed.restart()
    for client in range(COUNT):
        fed.who(client).record.permit()
    fed.serve("fourth")
    assert adverts(fed, posts) == set(range(COUNT))
    assert all(not torch.equal(models[name], fed.model(0)[name]) for name in models)
    with pytest.raises(CoterieError):  # one command, one run
        fed.serve("fifth")


def test_a_run_that_was_left_is_not_gone_back_to(tmp_path):
    fed = federation(tmp_path, rounds=2)
    with pytest.raises(KeyboardInterrupt):
        fed.serve("first", watch=stop_after(1))
    for client in range(COUNT):
        fed.who(client).record.permit()
    with pytest.raises(KeyboardInterrupt):
        fed.serve("second", watch=stop_after(1))
    for client in range(COUNT):
        fed.who(client).record.permit()
    fed.restart()
    with pytest.raises(CoterieError):
        fed.serve("first")
    assert any("for another: it does not go back" in line for line in fed.heard)


def test_a_run_in_which_nothing_was_signed_gives_way(tmp_path, monkeypatch):
    """A server that fell before its first sum may begin again, under another name."""
    fed = federation(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Live, "_round", stopped)
        with pytest.raises(KeyboardInterrupt):
            fed.serve("first")
    assert not adverts(fed)
    fed.serve("second")
    assert adverts(fed) == set(range(COUNT))


def stopped(*given):
    raise KeyboardInterrupt


def stop_after(rounds):
    def watch(event):
        if event.get("round") == rounds and "event" not in event:
            raise KeyboardInterrupt

    return watch


# --- a server that falls between the signatures and its checkpoint --------------------------------


def served_with_a_crash(place, monkeypatch, crashes):
    """Three rounds, the last member gone for good in the second one; models and history.

    If it ``crashes``, the second round's sum was signed, and the server fell before it was saved;
    else that round's first orders are lost, and it comes to nothing.
    """
    fed, save = federation(place, rounds=4), Live._save

    def crash(live, rounds):
        if rounds == 2:
            fed.grid.away.add(VICTIM)
            raise KeyboardInterrupt
        save(live, rounds)

    if crashes:
        with monkeypatch.context() as patch:
            patch.setattr(Live, "_save", crash)
            with pytest.raises(KeyboardInterrupt):
                fed.serve()
        fed.restart()
        return fed, fed.serve()

    def leave(event):
        if event.get("round") == 1 and "event" not in event:
            fed.grid.away.add(VICTIM)
            fed.grid.faults |= {(c, "2.0"): "lose" for c in range(COUNT)}

    return fed, fed.serve(watch=leave)


def test_a_signed_round_that_cannot_be_repeated_is_abandoned_and_the_run_goes_on(
    tmp_path, monkeypatch
):
    crashed, result = served_with_a_crash(tmp_path / "crashed", monkeypatch, True)
    plain, wanted = served_with_a_crash(tmp_path / "plain", monkeypatch, False)
    told = [event.get("abandoned", "") for event in result.history]
    assert "differs by 1 of its 4 members" in told[1]
    assert [bool(t) for t in told] == [False, True, False, False]
    assert [bool(e.get("abandoned")) for e in wanted.history] == [False, True, False, False]
    for client in range(COUNT - 1):
        mine, other = crashed.model(client), plain.model(client)
        assert all(torch.equal(mine[name], other[name]) for name in other)


def test_a_signed_round_is_repeated_to_the_bit_when_everybody_is_there(tmp_path, monkeypatch):
    fed, save = federation(tmp_path / "crashed", rounds=3), Live._save

    def crash(live, rounds):
        if rounds == 2:
            raise KeyboardInterrupt
        save(live, rounds)

    with monkeypatch.context() as patch:
        patch.setattr(Live, "_save", crash)
        with pytest.raises(KeyboardInterrupt):
            fed.serve()
    fed.restart()
    assert not any("abandoned" in e for e in fed.serve().history)
    never = federation(tmp_path / "never", rounds=3)
    never.serve()
    for name, tensor in never.model(0).items():
        assert torch.equal(fed.model(0)[name], tensor)


def test_every_round_of_a_secure_federation_is_saved(tmp_path, monkeypatch):
    fed = federation(tmp_path, rounds=3)
    fed.config["run"] |= {"checkpoint_every": 100}
    saved, save = [], Live._save
    monkeypatch.setattr(
        Live, "_save", lambda live, rounds: (saved.append(rounds), save(live, rounds))
    )
    fed.serve()
    assert saved[:4] == [0, 1, 2, 3]
