"""A federation that is served, all in one process: the loop's bits, whatever goes wrong."""

import json

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from flwr.app import ConfigRecord, RecordDict

from coterie.channel.channel import Channel
from coterie.channel.tasks import FETCH
from coterie.channel.wire import Message
from coterie.core.messages import Order
from coterie.engines.flower.engine import MISSING, ORDER
from coterie.engines.flower.messages import Digests, Packet, opened, sealed
from coterie.errors import ConfigError, WireError
from faked_grid import NODE, Federation, assert_models, loop, read, tree
from support import Stop, stop_after

HALF = {"run": {"cohort": 2, "rounds": 3}}
LOSSY = {"wire": {"up": "topk:share=0.3", "down": "qsgd:levels=7"}}
METHODS = {
    "fedavg": {},
    "ifca": {"k": 2},
    "fedclust": {"clusters": 2},
    "ditto": {},
    "scaffold": {},
    "dc-pfl": {
        "start": 1,
        "alpha": 2,
        "share": 0.9,
        "gamma": 0.9,
        "observe": 1,
        "smooth": 1,
        "bend": "absolute",
        "levels": 0.2,
        "trial": "two-models",
        "trial_on": "training",
    },
    "user-centric": {},
    "fedper": {"k": 1},
}
ROUNDS = {"dc-pfl": 8}  # the last has had a trial


def method(name, **tables):
    made = tree(method={"name": name, **METHODS[name]}, **tables)
    made["run"]["rounds"] = ROUNDS.get(name, 2)
    return made


@pytest.fixture(scope="module")
def plain():
    """What the loop makes of the small experiment with FedAvg and with Ditto."""
    return {name: loop(three(name)) for name in ("fedavg", "ditto")}


def three(name="fedavg", **tables):
    return tree(method={"name": name}, **tables)


# --- the loop's bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_served_gives_the_bits_of_the_loop(name, tmp_path):
    fed = Federation(tmp_path, method(name))
    result, wanted = fed.serve(), fed.loop()
    assert_models(fed, wanted)
    assert result.summary["kept"] == [0, 1, 2]
    assert result.versions == wanted.versions
    for mine, other in zip(result.history, wanted.history, strict=True):
        assert mine["bytes"]["up"] == other["bytes"]["up"]
        assert mine["groups"] == other["groups"]
        assert mine["received"] == pytest.approx(other["received"], rel=1e-5, nan_ok=True)
        assert "rejected" not in mine
        trial = name == "dc-pfl" and "trial" in mine["notes"]
        assert mine["exchanges"] == (2 if trial else 1)
    if name == "dc-pfl":
        assert any("trial" in e["notes"] for e in result.history)


@pytest.mark.parametrize("name", ["fedavg", "ifca", "ditto", "scaffold", "user-centric"])
def test_with_two_of_three_a_round_and_lossy_codecs(name, tmp_path):
    fed = Federation(tmp_path, method(name, **HALF, **LOSSY))
    result, wanted = fed.serve(), fed.loop()
    assert [e["cohort"] for e in result.history] == [e["cohort"] for e in wanted.history]
    assert len(result.history[0]["cohort"]) == 2
    assert_models(fed, wanted)


def test_clients_that_come_with_keys_are_the_same(tmp_path, plain):
    fed = Federation(tmp_path, three("ditto"), secure=True)
    fed.serve()
    assert_models(fed, plain["ditto"])
    told = json.loads((tmp_path / "site1/model.json").read_text())
    assert (told["client"], told["name"], told["rounds"]) == (1, "site1", 3)


def test_first_weights_of_the_server_reach_clients_that_have_not_got_the_file(tmp_path):
    from safetensors.torch import save_file

    start = loop(three()).weights(0).tensors()
    save_file({k: v.clone() for k, v in start.items()}, tmp_path / "start.safetensors")
    fed = Federation(tmp_path, three(model={"start": str(tmp_path / "start.safetensors")}))
    fed.serve()
    assert_models(fed, fed.loop())
    asked = fed.grid.orders("enrol")
    assert len(asked) == 6  # each once without and once with
    everything = b"".join(str(p.message.content).encode() for p in fed.grid.posts)
    assert str(tmp_path).encode() not in everything
    # Started anew, clients have them on disk.
    fed.restart()
    fed.serve()
    assert len(fed.grid.orders("enrol")) == 9


def test_clients_draw_the_same_first_weights_by_the_rule_of_the_terms(tmp_path):
    fed = Federation(tmp_path, method("ifca", model={"init": "authors"}))
    fed.serve()
    assert_models(fed, fed.loop())
    assert len(fed.grid.orders("enrol")) == 3  # nobody had to be sent them
    (agreed,) = (tmp_path / "site0/runs").glob("*/agreed.json")
    assert json.loads(agreed.read_text())["config"]["model"]["init"] == "authors"
    plain = Federation(tmp_path / "plain", method("ifca"))
    assert plain.serve().plan.start.vector.ne(fed.loop().plan.start.vector).any()


def test_an_unknown_initialisation_is_refused_before_anybody_is_asked(tmp_path):
    fed = Federation(tmp_path, three(model={"init": "author"}))
    with pytest.raises(ConfigError, match="did you mean 'authors'"):
        fed.serve()
    assert fed.grid.posts == []


def test_the_model_is_there_for_use(tmp_path, plain):
    fed = Federation(tmp_path, three("ditto"))
    fed.serve()
    for client, member in fed.grid.members.items():
        place = tmp_path / f"site{client}"
        assert member.kept == place / "model.safetensors"
        told = json.loads((place / "model.json").read_text())
        assert told["client"] == client
        assert told["method"] == "ditto"
        assert told["rounds"] == 3
        assert told["shape"] == [1, 8, 8]
        assert told["classes"] == [str(n) for n in range(10)]
        (run,) = (place / "runs").iterdir()
        for name in ("model.safetensors", "model.json"):
            assert (run / name).read_bytes() == (place / name).read_bytes()
    # Ditto's models are personal: those of two clients differ.
    assert not torch.equal(*(next(iter(fed.model(c).values())) for c in (0, 1)))


# --- what travels --------------------------------------------------------------------------------


def test_arrays_that_a_client_got_in_the_round_travel_as_digests(tmp_path):
    fed = Federation(tmp_path, three())
    result = fed.serve()
    size = 4 * result.plan.start.layout.size
    traffic = fed.traffic()
    # In each round the model goes once; keeping it repeats what the closing scores had.
    assert [traffic[o] for o in ("1.0", "2.0", "3.0", "final.0")] == [3 * size] * 4
    assert traffic["final.1"] == 0
    assert fed.served.spared == 3 * size


def test_a_new_round_takes_nothing_for_known(tmp_path):
    """The same weights in the next round are sent again: a client may have forgotten them."""
    fed = Federation(tmp_path, tree(train={"epochs": 0}, method={"name": "fedavg"}))
    result = fed.serve()
    size = 4 * result.plan.start.layout.size
    assert [fed.traffic()[o] for o in ("1.0", "2.0", "3.0")] == [3 * size] * 3


def test_a_second_exchange_of_a_round_repeats_no_array(tmp_path):
    fed = Federation(tmp_path, method("ifca"))
    result = fed.serve()
    size = 4 * result.plan.start.layout.size
    assert fed.traffic()["1.0"] == 3 * 2 * size  # two models, and the scores with them
    assert fed.traffic()["final.0"] == 3 * size


# --- things go wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "when", "fault"),
    [
        (1, "describe", "gone at pull"),
        (1, "enrol", "gone at push"),
        (1, "2.0", "gone at pull"),
        (1, "2.0", "gone after"),
        (0, "final.1", "gone after"),
        (1, "2.0", "twice"),
        (1, "2.0", "restart"),
    ],
)
def test_nothing_is_lost_by_it(client, when, fault, tmp_path, plain):
    fed = Federation(tmp_path, three("ditto"))
    fed.grid.faults[client, when] = fault
    result = fed.serve()
    assert not fed.grid.faults
    assert fed.grid.mended == ("gone" in fault)
    assert_models(fed, plain["ditto"])
    assert result.versions == plain["ditto"].versions
    assert result.summary["lost"] == 0
    assert [e["exchanges"] for e in result.history] == [1, 1, 1]


def test_when_the_superlink_goes_all_that_was_under_way_is_sent_again(tmp_path, plain):
    fed = Federation(tmp_path, three("ditto"))
    fed.grid.faults[2, "2.0"] = "gone at push"
    fed.serve()
    # The first two were taken by a SuperLink that is no more.
    second = [c for c, order in fed.grid.orders() if order == "2.0"]
    assert sorted(second) == [0, 0, 1, 1, 2]
    assert_models(fed, plain["ditto"])


def test_who_has_answered_works_once_though_it_is_asked_twice(tmp_path, monkeypatch):
    from coterie.client.client import Client

    fits, fit = [], Client.fit

    def counted(self, *given, **more):
        fits.append((self.id, self.round))
        return fit(self, *given, **more)

    monkeypatch.setattr(Client, "fit", counted)
    fed = Federation(tmp_path, three("ditto"))
    fed.serve()
    usual = sorted(fits)
    fits.clear()
    other = Federation(tmp_path / "other", three("ditto"))
    other.grid.faults[0, "2.0"] = "gone after"
    other.serve()
    assert len(other.grid.orders()) == len(fed.grid.orders()) + 3
    assert sorted(fits) == usual


def test_a_member_started_anew_in_a_round_is_sent_in_full_what_it_should_have(tmp_path, plain):
    fed = Federation(tmp_path, three())
    fed.grid.faults[2, "final.1"] = "restart"
    fed.serve()
    assert_models(fed, plain["fedavg"])
    kept = [p for p in fed.grid.posts if p.order == "final.1" and p.client == 2]
    assert [p.size > 0 for p in kept] == [False, True]
    assert read(kept[0].answer)["kind"] == MISSING
    assert any("continuing run" in text for text in fed.heard)


def test_one_that_misses_arrays_for_ever_is_given_up(tmp_path):
    fed = Federation(tmp_path, three())

    def missing(post, content):
        if post.client == 1 and post.order == "2.0":
            return sealed(Packet(MISSING, "", Message(b"{}", ())), Digests())
        return content

    fed.grid.change = missing
    result = fed.serve()
    assert [e["lost"] for e in result.history] == [0, 1, 0]
    assert sum(o == (1, "2.0") for o in fed.grid.orders()) == 2


LOSSES = {
    "error": "client 1 did not answer: the node is gone",
    "wrong node": "",
    "garbage": "client 1: this is not a message of Coterie",
    "refuse": "",
    "drop": "",
    "lose": "",
}


@pytest.fixture(scope="module")
def without_one():
    """The loop, where client 1's answer in round 2 is lost."""
    from coterie.engines.loop import Loop
    from coterie.experiment.experiment import ENGINES
    from faulty import Faulty

    with pytest.MonkeyPatch.context() as patch:

        def made(plan, _=None):
            return Faulty(Loop(plan), lose_reply=lambda c, o: (c, o) == (1, "2.0"))

        patch.setitem(ENGINES, "faulty", made)
        yield loop(three("ditto", run={"engine": "faulty"}))


@pytest.mark.parametrize("fault", LOSSES)
def test_what_does_not_come_is_lost_and_the_round_goes_on(fault, tmp_path, without_one):
    fed = Federation(tmp_path, three("ditto", run={"real_deadline": 60.0}))
    fed.grid.faults[1, "2.0"] = fault
    began = fed.clock.now
    result = fed.serve()
    assert_models(fed, without_one)
    assert result.versions == without_one.versions
    assert [e["lost"] + e["late"] for e in result.history] == [0, 1, 0]
    assert any(LOSSES[fault] in text for text in fed.said)
    waited = fed.clock.now - began
    assert (60 <= waited < 62) == (fault in ("drop", "lose")), waited


def test_a_message_lives_no_longer_than_the_deadline(tmp_path):
    fed = Federation(tmp_path, three(run={"real_deadline": 60.0}))
    fed.serve()
    lives = {p.order: p.message.metadata.ttl for p in fed.grid.posts if p.kind == ORDER}
    assert 50 < lives["1.0"] <= 60
    assert lives["final.0"] == 60  # scoring has as long, and the farewell
    other = Federation(tmp_path / "other", three())
    other.serve()
    lives = {p.order: p.message.metadata.ttl for p in other.grid.posts if p.kind == ORDER}
    assert lives["1.0"] == lives["final.0"] == 3600  # nobody waits for ever for others' machines


def test_one_that_is_away_is_lost_at_once_and_a_member_again_when_it_is_back(tmp_path):
    fed = Federation(tmp_path, three("ditto"))

    def watch(event):  # round r is told of when r+1 is done
        fed.grid.away = {1} if event["round"] == 1 else set()

    began = fed.clock.now
    result = fed.serve(watch=watch)
    assert [e["cohort"] for e in result.history] == [[0, 1, 2], [0, 1, 2], [0, 2]]
    assert result.summary["kept"] == [0, 1, 2]
    assert [e["lost"] for e in result.history] == [0, 0, 0]
    assert fed.clock.now - began < 1
    assert sum(c == 1 for c, order in fed.grid.orders() if order == "3.0") == 0


def test_one_that_goes_between_selection_and_order_holds_nobody_up(tmp_path):
    fed = Federation(tmp_path, three("ditto"))
    present = type(fed.grid).get_node_ids

    def leaving():  # it goes when round 2's orders are about to be sent
        if any(order == "1.0" for _, order in fed.grid.orders()) and fed.grid.away == set():
            fed.grid.away = {2}
            return [*present(fed.grid), NODE + 2]
        return present(fed.grid)

    fed.grid.get_node_ids = leaving
    began = fed.clock.now
    result = fed.serve()
    assert 2 not in result.history[2]["cohort"]
    assert result.summary["kept"] == [0, 1]
    assert 90 < fed.clock.now - began < 93  # it had a while to come back for its model


def test_scores_of_one_without_an_order_are_waited_for_only_a_little(tmp_path):
    fed = Federation(tmp_path, three(run={"cohort": 2}))
    first = loop(three(run={"cohort": 2})).history[1]["cohort"]
    (spare,) = {0, 1, 2} - set(first)
    fed.grid.faults[spare, "2.0"] = "drop"
    began = fed.clock.now
    result = fed.serve()
    assert 10 <= fed.clock.now - began < 11
    assert [e["lost"] for e in result.history] == [0, 0, 0]
    assert result.summary["lost"] == 1
    assert_models(fed, loop(three(run={"cohort": 2})))


# --- the server is started again -----------------------------------------------------------------


class Cut(BaseException):
    """The server dies; nobody gets over that."""


def dying(fed, order, after):
    """The grid of a server that dies in this exchange, before or after its clients have worked."""
    pull, push = fed.grid.pull_messages, fed.grid.push_messages

    def pulling(names):
        found = pull(names)
        if after and fed.grid.posts[-1].order == order:
            raise Cut
        return found

    def pushing(messages):
        (message,) = messages
        if not after and read(message.content)["body"].get("order") == order:
            raise Cut
        return push([message])

    fed.grid.pull_messages, fed.grid.push_messages = pulling, pushing
    with pytest.raises(Cut):
        fed.serve()
    fed.grid.pull_messages, fed.grid.push_messages = pull, push
    fed.grid.mend()


@pytest.mark.parametrize("restarted", [False, True], ids=["members stay", "members too"])
@pytest.mark.parametrize(
    ("order", "after"),
    [("1.0", False), ("1.0", True), ("2.0", True), ("3.0", True), ("final.1", True)],
)
def test_a_server_that_died_goes_on_to_the_same_bits(order, after, restarted, tmp_path, plain):
    fed = Federation(tmp_path, three("ditto"))
    dying(fed, order, after)
    if restarted:
        fed.restart()
    result = fed.serve()
    assert_models(fed, plain["ditto"])
    assert result.versions == plain["ditto"].versions
    assert len({r.name for r in (tmp_path / "site0/runs").iterdir()}) == 1


def test_a_server_that_died_before_it_began_begins(tmp_path, plain):
    fed = Federation(tmp_path, three())
    fed.grid.faults[0, "enrol"] = "error"

    def cut(post, content):
        if post.kind == "enrol":
            raise Cut
        return content

    fed.grid.change = cut
    with pytest.raises(Cut):
        fed.serve()
    fed.grid.change = None
    fed.serve()
    assert_models(fed, plain["fedavg"])


@pytest.mark.parametrize("round", [1, 2])
def test_stopped_after_a_round_and_served_again(round, tmp_path):
    made = method("scaffold", **LOSSY, run={"cohort": 2})
    made["run"]["rounds"] = 3
    fed = Federation(tmp_path, made)
    with pytest.raises(Stop):
        fed.serve(watch=stop_after(round))
    fed.restart(1)
    result = fed.serve()
    wanted = fed.loop()
    assert_models(fed, wanted)
    assert result.versions == wanted.versions


def test_a_finished_run_served_again_trains_nobody(tmp_path, plain):
    fed = Federation(tmp_path, three("ditto"))
    fed.serve()
    fed.grid.posts.clear()
    fed.restart()
    result = fed.serve()
    assert fed.grid.orders() == []  # all have their models
    assert result.summary["kept"] == [0, 1, 2]
    assert_models(fed, plain["ditto"])


def test_another_configuration_is_refused_in_a_folder_that_serves(tmp_path):
    fed = Federation(tmp_path, three())
    fed.serve()
    fed.config = three("ditto")
    with pytest.raises(ConfigError, match="serves another configuration"):
        fed.serve()


def test_members_started_again_in_every_round_change_nothing(tmp_path, plain):
    fed = Federation(tmp_path, three("ditto"))
    for number in (1, 2, 3):
        fed.grid.faults |= {(c, f"{number}.0"): "restart" for c in range(3)}
    fed.serve()
    assert_models(fed, plain["ditto"])
    assert len(fed.grid.orders("enrol")) == 3  # what they agreed on is on their disks


# --- what a client does not do -------------------------------------------------------------------


def test_an_order_of_an_unknown_run_makes_a_stranger_that_is_told_again(tmp_path):
    import shutil

    fed = Federation(tmp_path, three())

    def watch(event):
        if event["round"] == 1:  # when round 2 is done: all that it has is gone
            shutil.rmtree(tmp_path / "site1/runs")
            fed.restart(1)

    result = fed.serve(watch=watch)
    third = [(p.client, read(p.answer)["kind"]) for p in fed.grid.posts if p.order == "3.0"]
    assert third == [(0, "order"), (1, "stranger"), (2, "order")]
    assert [e["lost"] for e in result.history] == [0, 0, 1]

    other = Federation(tmp_path / "other", tree(method={"name": "fedavg"}, run={"rounds": 4}))

    def again(event):
        if event["round"] == 1:
            shutil.rmtree(tmp_path / "other/site1/runs")
            other.restart(1)

    result = other.serve(watch=again)
    assert [e["lost"] for e in result.history] == [0, 0, 1, 0]
    assert [c for c, _ in other.grid.orders("enrol")] == [0, 1, 2, 1]
    assert result.summary["kept"] == [0, 1, 2]


@pytest.fixture
def enrolled(tmp_path):
    """A federation whose clients wait for orders, and its engine's run."""
    fed = Federation(tmp_path, three())
    with pytest.raises(Stop):
        fed.serve(watch=stop_after(1))
    return fed


def answered(fed, order, arrays=None, run=None, client=0):
    """What a member says to an order that was made by hand."""
    from coterie.channel.wire import Wire

    wire = Wire(fed.grid.members[client]._runtime.wire.layout)
    body = {"order": "9.0", "round": 8, "task": order, "arrays": arrays or {}, "config": {}}
    packet = Packet(ORDER, run or fed.served.run, wire.pack(body))
    told, _ = opened(fed.grid.members[client].answer(sealed(packet, Digests())), {})
    return told, wire


def test_a_client_does_not_hand_out_its_model(enrolled):
    start = enrolled.served.start
    told, wire = answered(
        enrolled, FETCH, {"model": torch.frombuffer(bytearray(start), dtype=torch.float32)}
    )
    refused = {"error": "WireError", "text": "a client does not hand out its personal model"}
    assert wire.unpack(told.message) == refused
    assert not told.message.payloads
    assert "a client does not hand out its personal model" in enrolled.heard


def test_a_run_that_it_was_not_told_of(enrolled):
    assert answered(enrolled, "train", run="f" * 16)[0].kind == "stranger"


@pytest.mark.parametrize("run", ["../../etc", "a/b", "a b", "."])
def test_a_name_of_a_run_is_no_path(enrolled, run, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    told, _ = answered(enrolled, "train", run=run)
    assert told.kind == "refused"
    assert "is not a valid name of a run" in told.told["text"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_task_that_the_method_has_not_is_named(enrolled):
    told, wire = answered(enrolled, "burn")
    assert wire.unpack(told.message) == {
        "error": "CoterieError",
        "text": "it failed; its log says more",
    }
    assert "method 'fedavg' has no task 'burn'" in enrolled.heard


def test_such_an_answer_is_rejected_by_name_and_the_round_goes_on(tmp_path, monkeypatch):
    request = Channel._request

    def other(self, exchange, out):
        if out.order.client == 1 and exchange.name == "2.0":
            out.order = Order(1, "burn", out.order.arrays, out.order.config)
        return request(self, exchange, out)

    monkeypatch.setattr(Channel, "_request", other)
    result = Federation(tmp_path, three()).serve()
    assert [e.get("rejected") for e in result.history] == [
        None,
        {"1": "it failed; its log says more"},
        None,
    ]
    assert result.summary["kept"] == [0, 1, 2]


def test_an_order_of_another_kind_or_none_is_refused(enrolled):
    member = enrolled.grid.members[0]
    for content, told in [
        (RecordDict(), "not a message of Coterie"),
        (RecordDict({"head": ConfigRecord({"format": 2})}), "another version"),
        (sealed(Packet("burn", "a", Message(b"{}", ())), Digests()), "of an unknown kind: 'burn'"),
        (sealed(Packet("describe", "a", Message(b"{}", ())), Digests()), "KeyError"),
        (
            sealed(Packet("order", enrolled.served.run, Message(b"[]", ())), Digests()),
            "TypeError",
        ),
    ]:
        answer, _ = opened(member.answer(content), {})
        assert answer.kind == "refused"
        assert told in answer.told["text"]


def test_another_version_of_coterie_is_named(tmp_path):
    fed = Federation(tmp_path, three())
    about = json.dumps({"version": "0.0.1", "config": fed.config})
    content = sealed(Packet("describe", "", Message(b"{}", ()), {"json": about}), Digests())
    answer, _ = opened(fed.grid.members[2].answer(content), {})
    assert answer.kind == "refused"
    assert "the server runs Coterie 0.0.1, client 2 " in answer.told["text"]


# --- what comes from a client --------------------------------------------------------------------


def lying(change, when="2.0", client=1):
    """Puts another head on one client's answer."""

    def put(post, content):
        if post.client != client or when not in (post.order, post.kind):
            return content
        head = {**dict(content["head"]), **change}
        return RecordDict({"head": ConfigRecord(head), "arrays": content["arrays"]})

    return put


def editing(edit):
    """Changes the body of an answer."""

    def put(content):
        head = dict(content["head"])
        header = json.loads(head["header"])
        edit(header["body"])
        head["header"] = json.dumps(header).encode()
        return RecordDict({"head": ConfigRecord(head), "arrays": content["arrays"]})

    return put


def many(count, **tables):
    made = tree(count, data={"samples": 25 * count}, run={"rounds": 1}, **tables)
    return {**made, "partition": {"name": "iid"}}


LOST = [
    {"digests": 5},
    {"digests": [1, 2]},
    {"digests": ["0" * 64]},
    {"header": "text"},
    {"header": 7},
    {"kind": 3},
    {"run": [1.0]},
    {"run": "another"},
    {"kind": "keep"},
    {"kind": "stranger"},
    {"seconds": "long"},
    {"format": 9},
]
REJECTED = [
    {"header": b"", "digests": []},
    {"header": b"{", "digests": []},
    {"header": b"[]", "digests": []},
    {"header": b"null", "digests": []},
    {"header": b'{"body":{},"arrays":[]}', "digests": []},
    {"header": b'{"body":[],"arrays":[]}', "digests": []},
]


def test_heads_that_lie_cost_only_their_senders(tmp_path):
    lies = [*LOST, *REJECTED]
    fed = Federation(tmp_path, many(len(lies) + 1))
    puts = [lying(change, "1.0", client) for client, change in enumerate(lies, 1)]
    fed.grid.change = lambda post, content: (puts[post.client - 1] if post.client else keep)(
        post, content
    )
    result = fed.serve()
    assert result.history[0]["lost"] == len(lies)
    rejected = {str(1 + len(LOST) + i) for i in range(len(REJECTED))}
    assert set(result.history[0]["rejected"]) == rejected
    assert result.summary["kept"] == list(range(len(lies) + 1))  # later they answered well


def keep(post, content):
    return content


IMPOSSIBLE = [
    (lambda b: b.update(examples=10**9), "it counts 1000000000 samples, and has"),
    (lambda b: b.update(examples=True), "it counts True samples"),
    (lambda b: b["metrics"].update(loss=float("nan")), "is not finite"),
    (lambda b: b.update(version=7), "not a valid name"),
    (lambda b: b["arrays"].clear(), "differ in form from those of the others (model of"),
    (lambda b: b["arrays"]["model"].update(of=["hidden1"]), ""),
    (lambda b: b.update(error="TrainingError", text="my disk is full"), "my disk is full"),
]


def test_answers_that_cannot_be_are_rejected_by_name(tmp_path):
    fed = Federation(tmp_path, many(len(IMPOSSIBLE) + 2))
    puts = [editing(edit) for edit, _ in IMPOSSIBLE]

    def put(post, content):
        lies = post.order == "1.0" and post.client < len(puts)
        return puts[post.client](content) if lies else content

    fed.grid.change = put
    result = fed.serve()
    rejected = result.history[0]["rejected"]
    assert sorted(map(int, rejected)) == list(range(len(IMPOSSIBLE)))
    for client, (_, told) in enumerate(IMPOSSIBLE):
        assert told in rejected[str(client)]


def test_without_it_the_round_is_as_if_it_had_been_lost(tmp_path, without_one):
    fed = Federation(tmp_path, three("ditto"))
    spoilt = editing(lambda b: b["metrics"].update(loss=float("nan")))
    fed.grid.change = lambda post, content: (
        spoilt(content) if (post.client, post.order) == (1, "2.0") else content
    )
    result = fed.serve()
    assert [list(e.get("rejected", {})) for e in result.history] == [[], ["1"], []]
    assert_models(fed, without_one)
    assert result.versions == without_one.versions


DESCRIPTIONS = [
    "5",
    "[]",
    "{}",
    '{"client": 4}',
    '{"client": "5", "data": {}}',
    '{"client": 6, "data": {}}',
    '{"client": -1, "data": {}}',
    '{"client": true, "data": {}}',
    "nonsense",
]


@pytest.mark.parametrize("secure", [False, True])
def test_descriptions_that_lie_keep_only_their_senders_out(secure, tmp_path):
    count = len(DESCRIPTIONS)
    fed = Federation(tmp_path, many(count + 2), secure=secure)
    puts = [lying({"json": text}, "describe", 1 + i) for i, text in enumerate(DESCRIPTIONS)]
    fed.grid.change = lambda post, content: (
        puts[post.client - 1](post, content) if 0 < post.client <= count else content
    )
    result = fed.serve(expect=2)
    assert result.summary["kept"] == [0, count + 1]
    assert any("cannot take part" in said for said in fed.said)
    assert {c for c, _ in fed.grid.orders()} == {0, count + 1}


def test_one_that_is_refused_is_not_asked_in_every_look(tmp_path):
    fed = Federation(tmp_path, three())
    fed.grid.change = lying({"json": "5"}, "describe")
    began = fed.clock.now

    def later(seconds):
        fed.clock.now += seconds
        if fed.clock.now > began + 40:
            fed.grid.change = None

    fed.clock.sleep = later
    fed.serve()  # it waits for all three, and the third mends its ways
    asked = [c for c, _ in fed.grid.orders("describe")].count(1)
    assert 2 <= asked <= 4
    assert sum("cannot take part" in text for text in fed.said) == 1


# --- late clients --------------------------------------------------------------------------------


def late(fed, client, round=1):
    fed.grid.away = {client}

    def watch(event):
        if event["round"] == round:
            fed.grid.away = set()

    return watch


@pytest.mark.parametrize("secure", [False, True])
def test_a_late_client_is_admitted(secure, tmp_path):
    fed = Federation(tmp_path, tree(method={"name": "ditto"}, run={"rounds": 4}), secure=secure)
    result = fed.serve(expect=2, watch=late(fed, 2))
    assert [e["cohort"] for e in result.history] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert result.summary["kept"] == [0, 1, 2]
    assert [row["client"] for row in result.clients] == [0, 1, 2]
    events = [json.loads(x) for x in (tmp_path / "served/events.jsonl").read_text().splitlines()]
    (came,) = [e for e in events if e.get("event") == "arrival"]
    assert (came["round"], came["clients"]) == (3, [2])


def test_with_a_late_client_a_server_that_died_goes_on_to_the_same_bits(tmp_path):
    models = []
    for name, stops in (("whole", 9), ("cut", 3)):
        place = tmp_path / name
        place.mkdir()
        fed = Federation(place, tree(method={"name": "ditto"}, run={"rounds": 5}))
        wait = late(fed, 2)

        def watch(event):
            wait(event)
            if event["round"] == stops:
                raise Stop

        if stops < 5:
            with pytest.raises(Stop):
                fed.serve(expect=2, watch=watch)
            fed.restart()
            result = fed.serve(expect=2)
        else:
            result = fed.serve(expect=2, watch=watch)
        assert [len(e["cohort"]) for e in result.history] == [2, 2, 3, 3, 3]
        models.append([fed.model(c) for c in range(3)])
    for mine, other in zip(*models, strict=True):
        assert all(torch.equal(mine[k], other[k]) for k in other)


@pytest.mark.parametrize("secure", [False, True])
def test_a_late_client_whose_data_does_not_fit_stays_outside(secure, tmp_path):
    fed = Federation(tmp_path, tree(method={"name": "fedavg"}, run={"rounds": 4}), secure=secure)
    wide = json.dumps  # its samples are of another shape

    def other(post, content):
        if post.client != 2 or post.kind != "describe":
            return content
        head = dict(content["head"])
        about = json.loads(head["json"])
        about["data"]["shape"] = [3, 8, 8]
        return RecordDict(
            {"head": ConfigRecord({**head, "json": wide(about)}), "arrays": content["arrays"]}
        )

    fed.grid.change = other
    result = fed.serve(expect=2, watch=late(fed, 2))
    assert [e["cohort"] for e in result.history] == [[0, 1]] * 4
    assert any("its data is of shape (3, 8, 8), not (1, 8, 8)" in text for text in fed.said)
    assert not [c for c, _ in fed.grid.orders("enrol") if c == 2]
    assert not [c for c, _ in fed.grid.orders() if c == 2]


def test_a_method_that_admits_nobody_says_so(tmp_path, monkeypatch):
    from dataclasses import replace

    from coterie.experiment import config

    made = config.method_of
    monkeypatch.setattr(config, "method_of", lambda asked: replace(made(asked), admit=None))
    fed = Federation(tmp_path, three())
    result = fed.serve(expect=2, watch=late(fed, 2))
    assert [e["cohort"] for e in result.history] == [[0, 1]] * 3
    told = (
        "client 2 cannot take part: it came late, and method fedavg has no way to admit newcomers"
    )
    assert sum(text.startswith(told) for text in fed.said) == 1


# --- packets -------------------------------------------------------------------------------------


def test_a_parcel_comes_out_as_it_went_in():
    message = Message(b'{"a":1}', (b"abc", b"", memoryview(b"defg")))
    content = sealed(Packet("order", "ab12", message, {"json": "{}"}), Digests())
    packet, came = opened(content, {})
    assert packet == Packet("order", "ab12", message, {"json": "{}"})
    assert sorted(map(bytes, came.values())) == [b"abc", b"defg"]


def test_what_the_receiver_has_is_named_and_not_sent():
    digests, message = Digests(), Message(b"{}", (b"abc", b"defg"))
    has = {digests.of(message.payloads[0]): b"abc"}
    content = sealed(Packet("order", "a", message), digests, has)
    assert [a.data for a in content["arrays"].values()] == [b"defg"]
    assert opened(content, has)[0].message.payloads == (b"abc", b"defg")
    with pytest.raises(KeyError):
        opened(content, {})


def test_an_array_under_another_digest_is_refused():
    content = sealed(Packet("order", "a", Message(b"{}", (b"abc",))), Digests())
    content["arrays"]["0" * 64] = next(iter(content["arrays"].values()))
    with pytest.raises(WireError, match="not have the digest that it was sent under"):
        opened(content, {})
