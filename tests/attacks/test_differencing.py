"""A malicious server that wants the sum of five and the sum of four of them: it gets one sum.

The server is our own with its checks taken out; members are as ``coterie join`` starts them.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.channel.channel import Channel
from coterie.channel.privacy import secure_sums as secure
from coterie.channel.privacy import sum_rules
from coterie.channel.privacy.record import Part, Record
from coterie.channel.privacy.secagg import Rejected
from coterie.channel.privacy.secure_sums import Secure
from coterie.deploy.data import MemberData
from coterie.deploy.join import Joining, _permit_run
from coterie.deploy.member import FederationMember
from coterie.errors import Abandoned, CoterieError, RunDirError, TrainingError
from coterie.experiment.observers import Saving
from faked_grid import Federation, read, tree
from malicious import in_a_run

VICTIM, COUNT = 4, 5
PRIVACY = {"secure": True, "randomness": "system"}


def federation(place, rounds=1, method="fedavg", keys=None, **more):
    made = tree(
        COUNT,
        data={"samples": 25 * COUNT},
        run={"rounds": rounds},
        method={"name": method, **more},
        privacy=PRIVACY,
    )
    return Federation(place, made, secure=True, keys=keys)


def nearly(model):
    """A model with one number changed by one unit in the last place."""
    vector = model.vector.clone()
    vector[0] = torch.nextafter(vector[0], torch.tensor(9.0))
    return replace(model, vector=vector)


def forgetful(server):
    """A server that remembers nothing of the sums before: another one, as it were."""
    other = Secure(server.channel, server.privacy, server.roster, server.run, server.method)
    other.agreement = server.agreement
    return other


class Attack:
    """What the server does after each honest sum: a second one that it has no right to.

    ``asks(orders, into)`` makes other orders and slots of them, or gives None for no attack.
    """

    def __init__(self, monkeypatch, asks, round=None, at=0, before=lambda: None):
        self.sums, self.refused, honest = [], [], Secure.sums

        def sums(server, orders, into, by_examples=True, noise=None):
            total = honest(server, orders, into, by_examples, noise)
            if server.channel.phase.round != at:
                return total
            before()
            other = forgetful(server)
            phase = server.channel.phase
            now, phase.round = phase.round, at if round is None else round
            try:
                again, weights, alike = asks(orders, into)
                self.sums.append(honest(other, again, weights, by_examples ^ alike))
            except (Abandoned, TrainingError) as why:
                self.refused.append(str(why))
            finally:
                phase.round = now
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


def once_more_in_another_slot(orders, into):
    """Everybody again, counting as before: one more view of the same uploads."""
    return orders, {o.client: {"other": 1.0} for o in orders}, False


def with_other_weights(orders, into):
    """Everybody again, in another slot, the victim by a little less than the others."""
    weights = {o.client: {"other": 1.0 - 2**-16 * (o.client == VICTIM)} for o in orders}
    return orders, weights, False


def by_samples_no_more(orders, into):
    """The same clients again, each counting alike: most have as many samples."""
    return orders, {o.client: {"other": 1.0} for o in orders}, True


ATTACKS = (
    *(without_victim, nearly_the_same, fewer_steps),
    *(in_another_slot, once_more_in_another_slot, with_other_weights, by_samples_no_more),
)


@pytest.mark.parametrize("asks", ATTACKS)
@pytest.mark.parametrize("restarted", [False, True], ids=["", "members restarted"])
def test_a_second_sum_of_the_same_round_is_refused(asks, restarted, tmp_path, monkeypatch):
    fed = federation(tmp_path)
    monkeypatch.setattr(sum_rules, "unequal", lambda weights: [])  # the server's own check
    before = fed.restart if restarted else lambda: None
    attack = Attack(monkeypatch, asks, before=before)
    result = fed.serve()
    assert not attack.sums
    assert len(attack.refused) == 1
    assert "abandoned" not in result.history[0]  # the honest sum was made
    words = ("been in", "another order", "single clients out")
    said = [line for line in fed.heard if any(word in line for word in words)]
    assert {line.split("client ")[1][0] for line in said} >= {"0", "1", "2", "3"}


def test_a_method_that_declares_two_sums_does_not_get_two_sets_of_clients(tmp_path, monkeypatch):
    """FedClust's trial sums models, then scores: of the same clients, each counted alike."""
    fed = federation(tmp_path, method="fedclust", fallback=False)
    fed.config["privacy"] = {**PRIVACY, "reveal": "final-layer"}
    fed.config["train"] |= {"steps": 2}
    attack = Attack(monkeypatch, nearly_the_same)
    fed.serve()
    assert not attack.sums
    assert any("already received another order for task" in line for line in fed.heard)


@pytest.mark.parametrize("asks", [without_victim, nearly_the_same])
def test_a_round_before_the_last_one_signed_is_over(asks, tmp_path, monkeypatch):
    """Its training streams, and with the model of then its uploads, would be the same."""
    fed = federation(tmp_path, rounds=2)
    attack = Attack(monkeypatch, asks, round=0, at=1)
    fed.serve()
    assert not attack.sums
    assert any("takes none of a round before it" in t for t in fed.heard)


@pytest.mark.parametrize(
    "weights",
    [
        {c: 1 if c == VICTIM else 0.5 for c in range(COUNT)},
        {99: math.nan, **{c: 2**30 if c == VICTIM else 1 for c in range(COUNT)}},
        {c: 2**40 if c == VICTIM else 2**39 for c in range(COUNT)},
        dict.fromkeys(range(COUNT), True),
        dict.fromkeys(range(COUNT), 1) | {77: 1},
        {c: 1 if c == VICTIM else 0 for c in range(COUNT)},
    ],
    ids=["fractions", "NaN", "huge", "no numbers", "a stranger", "zeros"],
)
def test_weights_that_leave_one_upload_in_a_sum_are_refused(weights, tmp_path, monkeypatch):
    """One sum would be enough: of half an upload, a whole number of steps is nothing."""
    fed = federation(tmp_path)
    monkeypatch.setattr(secure._Call, "weights", lambda call, slot: dict(weights))
    (told,) = fed.serve().history
    assert "abandoned" in told
    assert not adverts(fed)
    refused = [t for t in fed.heard if "received the weight" in t or "single clients out" in t]
    assert len(refused) >= COUNT


def test_who_gave_values_without_signing_gives_none_to_more_clients(tmp_path, monkeypatch):
    """A sum needs the signatures of a part of its members: the others must not forget it."""
    count, clients = 7, {5, 6}
    made = tree(
        count,
        data={"samples": 25 * count},
        run={"rounds": 1},
        privacy={**PRIVACY, "threshold": 0.51},
    )
    fed = Federation(tmp_path, made, secure=True)
    sums, honest, carry, signs = [], Secure.sums, Secure._carry, set(range(count))

    def carried(server, call, step, running, said):
        if step == "survivors":
            said = {s: {c: b for c, b in m.items() if c in signs} for s, m in said.items()}
        return carry(server, call, step, running, said)

    def twice(server, orders, into, by_examples=True, noise=None):
        nonlocal signs
        for people, here in (
            (set(range(count)) - clients, {0, 1, 2}),
            (set(range(count)), {3, 4, 5, 6}),
        ):
            signs = here
            other = forgetful(server)
            asked = [o for o in orders if o.client in people]
            sums.append(honest(other, asked, {c: into[c] for c in people}, False, noise))
        return sums[0]

    monkeypatch.setattr(Secure, "_carry", carried)
    monkeypatch.setattr(Secure, "sums", twice)
    fed.serve()
    assert [total.clients for (total,) in (s.values() for s in sums)] == [(0, 1, 2, 3, 4)]
    refused = [t for t in fed.heard if "differs by 2 of its 7 members" in t]
    assert {t.split("client ")[1][0] for t in refused} >= set("01234")


# --- one sum, of which its members were told different things -----------------------------------


def hidden_in_a_mark(body):
    """The client would obey what stands under the mark, and sign the rest."""
    real = {**body, "config": {**body["config"], "steps": 1}}
    return {**body, "$dict": [[key, value] for key, value in real.items()]}


def hidden_whole(body):
    """Of what stands under the mark alone, nothing would be signed."""
    real = {**body, "config": {**body["config"], "steps": 1}}
    return {"$dict": [[key, value] for key, value in real.items()]}


def hidden_deeper(body):
    real = {**body["config"], "steps": 1}
    return {**body, "config": {**body["config"], "$dict": [[k, v] for k, v in real.items()]}}


def another_order(body):
    return {**body, "config": {**body["config"], "steps": 1}}


@pytest.mark.parametrize("lie", [hidden_in_a_mark, hidden_whole, hidden_deeper, another_order])
def test_an_order_that_all_but_one_are_told_otherwise_makes_no_sum(lie, tmp_path, monkeypatch):
    """What the others make of an order of theirs, a server may know: the victim is what is left.

    They carry theirs out, so it is what members sign that stops the sum.
    """
    fed, order = federation(tmp_path), FederationMember._order

    def forged(member, packet, came):
        header = json.loads(packet.message.header)
        if "slot" in header["body"].get("beside", {}) and member.who.id != VICTIM:
            header["body"] = lie(header["body"])
            message = replace(packet.message, header=json.dumps(header).encode())
            packet = replace(packet, message=message)
        return order(member, packet, came)

    monkeypatch.setattr(FederationMember, "_order", forged)
    (told,) = fed.serve().history
    assert "abandoned" in told
    unread = lie in (hidden_in_a_mark, hidden_whole)
    assert adverts(fed) == ({VICTIM} if unread else set(range(COUNT)))


@pytest.mark.parametrize(
    ("table", "key", "value"), [("train", "lr", 1e-30), ("train", "steps", 1), ("run", "rounds", 9)]
)
def test_terms_that_all_but_one_are_told_otherwise_make_no_sum(
    table, key, value, tmp_path, monkeypatch
):
    """All orders are the same and honest: it is the settings that differ."""
    fed, enrol = federation(tmp_path), FederationMember._enrol

    def forged(member, packet, came):
        terms = json.loads(packet.told["json"])
        if member.who.id != VICTIM:
            terms["config"][table][key] = value
            packet = replace(packet, told={**packet.told, "json": json.dumps(terms)})
        return enrol(member, packet, came)

    monkeypatch.setattr(FederationMember, "_enrol", forged)
    (told,) = fed.serve().history
    assert "abandoned" in told


def test_samples_count_in_all_sums_of_a_round_or_in_none_whatever_the_slot(tmp_path):
    record = in_a_run(tmp_path)
    part = Part(0, "a", "'x'", (1, True), {0: 1, 1: 1, 2: 1})
    record.give(part, 2)
    record.sign(0, [0, 1, 2])
    with pytest.raises(Rejected, match="count otherwise"):
        record.give(replace(part, what="b", slot="'y'", weighs=(1, False)), 2)


@pytest.mark.parametrize("number", [True, 1.0, -1, "1", None])
def test_a_round_is_a_number(number, tmp_path):
    """Else a record would take one round for another."""
    record = in_a_run(tmp_path)
    part = Part(1, "a", "0", (1, False), {0: 1, 1: 1, 2: 1})
    record.give(part, 1)
    with pytest.raises(Rejected):
        record.give(replace(part, round=number, what="b", counts={0: 1, 1: 1}), 9)
    record.give(part, 1)


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
    elsewhere = FederationMember(
        tmp_path / "elsewhere", fed.sources[0], fed.who(0), "cpu", fed.heard.append
    )
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
        patch.setattr(Channel, "open", stopped)
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


def test_a_permission_is_for_the_next_run_and_not_for_the_one_after(tmp_path):
    """Started again during a run, a client goes on with it, and with no other after that."""
    record = Record(tmp_path / "signed.json", 0, lasting=True)
    part = Part(0, "a", "0", (1, False), {0: 1, 1: 1, 2: 1})
    with pytest.raises(Rejected, match="is in no run yet"):
        record.enter("first")
    record.permit()
    record.enter("first")
    record.give(part, 1)  # not signed: the sum may be unmasked all the same
    record.permit()
    record.enter("first")
    for name in ("second", "third"):
        with pytest.raises(Rejected, match="has taken part in run first"):
            record.enter(name)
    record.permit()
    record.enter("second")
    record.enter("third")  # to which the second, that learned nothing, gives way
    record.give(part, 1)
    record.permit()
    with pytest.raises(Rejected, match="does not go back"):
        record.enter("first")


@pytest.mark.parametrize("content", [b"", b"{", b'{"record": {}, "digest": ""}', b"\xff"])
def test_a_damaged_record_is_a_sentence_and_no_empty_one(content, tmp_path):
    record = Record(tmp_path / "signed.json", 0, lasting=True)
    record.permit()
    record.path.write_bytes(content)
    for work in (record.permit, lambda: record.enter("a"), lambda: record.check(0, "0", (1, True))):
        with pytest.raises(RunDirError, match="Ask for new keys"):
            work()


def test_a_record_that_is_gone_is_missed(tmp_path):
    fed = federation(tmp_path)
    fed.serve()
    record = fed.who(0).record
    joining = Joining("127.0.0.1:1", tmp_path / "site0", MemberData(simulated=True), None)
    _permit_run(joining, record, fed.heard.append)
    record.path.unlink()
    with pytest.raises(CoterieError, match=r"record of what it signed, .* is gone"):
        _permit_run(joining, record, fed.heard.append)


def test_keys_in_a_place_that_cannot_be_written_will_do_without_secure_sums(tmp_path):
    (tmp_path / "keys").write_text("no folder")
    record = Record(tmp_path / "keys" / "signed.json", 0, lasting=True)
    heard = []
    joining = Joining("127.0.0.1:1", tmp_path / "site", MemberData(simulated=True), None)
    _permit_run(joining, record, heard.append)
    assert "cannot take part in a run with secure sums" in heard[0]
    with pytest.raises(RunDirError):
        _permit_run(replace(joining, secure=True), record, heard.append)


# --- a server that falls between the signatures and its checkpoint --------------------------------


def served_with_a_crash(place, monkeypatch, crashes, keys=None):
    """Three rounds, the last member gone for good in the second one; models and history.

    If it ``crashes``, the second round's sum was signed, and the server fell before it was saved;
    else that round's first orders are lost, and it comes to nothing.
    """
    fed, save = federation(place, rounds=4, keys=keys), Saving.save

    def crash(saving):
        if saving.session.run.done == 2:
            fed.grid.away.add(VICTIM)
            raise KeyboardInterrupt
        save(saving)

    if crashes:
        with monkeypatch.context() as patch:
            patch.setattr(Saving, "save", crash)
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
    plain, wanted = served_with_a_crash(tmp_path / "plain", monkeypatch, False, crashed.keys)
    told = [event.get("abandoned", "") for event in result.history]
    assert "differs by 1 of its 4 members" in told[1]
    assert [bool(t) for t in told] == [False, True, False, False]
    assert [bool(e.get("abandoned")) for e in wanted.history] == [False, True, False, False]
    for client in range(COUNT - 1):
        mine, other = crashed.model(client), plain.model(client)
        assert all(torch.equal(mine[name], other[name]) for name in other)


def test_a_signed_round_is_repeated_to_the_bit_when_everybody_is_there(tmp_path, monkeypatch):
    fed, save = federation(tmp_path / "crashed", rounds=3), Saving.save

    def crash(saving):
        if saving.session.run.done == 2:
            raise KeyboardInterrupt
        save(saving)

    with monkeypatch.context() as patch:
        patch.setattr(Saving, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            fed.serve()
    fed.restart()
    assert not any("abandoned" in e for e in fed.serve().history)
    never = federation(tmp_path / "never", rounds=3, keys=fed.keys)
    never.serve()
    for name, tensor in never.model(0).items():
        assert torch.equal(fed.model(0)[name], tensor)


def test_every_round_of_a_secure_federation_is_saved(tmp_path, monkeypatch):
    fed = federation(tmp_path, rounds=3)
    fed.config["run"] |= {"checkpoint_every": 100}
    saved, save = [], Saving.save
    monkeypatch.setattr(Saving, "save", lambda it: (saved.append(it.session.run.done), save(it)))
    fed.serve()
    assert saved[:4] == [0, 1, 2, 3]
