"""A federation among others: what a hostile server gets of a client, and a hostile client does."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from flwr.app import ConfigRecord, RecordDict

from coterie.channel.tasks import FETCH
from coterie.channel.wire import Message
from coterie.deploy.data import MemberData
from coterie.deploy.serve import Serving, serve
from coterie.engines.flower.engine import ORDER
from coterie.engines.flower.messages import Digests, Packet, opened, sealed
from coterie.errors import ConfigError, RunDirError, TrainingError
from coterie.results.rundir import RunDir
from faked_grid import Federation, assert_models, loop, read, tree
from support import Stop, stop_after

INF = float("inf")


def three(name="fedavg", **tables):
    return tree(method={"name": name}, **tables)


def many(count, rounds=1, **tables):
    """So many clients with as many samples each."""
    made = tree(count, data={"samples": 25 * count}, run={"rounds": rounds}, **tables)
    made.setdefault("method", {"name": "fedavg"})
    return {**made, "partition": {"name": "iid"}}


def written(head):
    """A message as it lies on the wire, with another head."""
    return lambda content: RecordDict(
        {"head": ConfigRecord({**dict(content["head"]), **head}), "arrays": content["arrays"]}
    )


def edited(edit):
    """Changes the header of an answer: its body and the list of its arrays."""

    def put(content):
        header = json.loads(content["head"]["header"])
        edit(header)
        return written({"header": json.dumps(header).encode()})(content)

    return put


def body(edit):
    return edited(lambda header: edit(header["body"]))


def lying(fed, *lies, client=1):
    """Makes a client lie: pairs of an order's or message's name, and what becomes of the answer."""

    def put(post, content):
        for when, change in lies:
            if post.client == client and when in (post.order, post.kind):
                return change(content)
        return content

    fed.grid.change = put
    return fed


# --- a server that wants what is not its own ------------------------------------------------------


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory):
    """A federation whose clients wait for orders."""
    fed = Federation(tmp_path_factory.mktemp("enrolled"), three("ditto"))
    with pytest.raises(Stop):
        fed.serve(watch=stop_after(1))
    return fed


def ordered(fed, told, payloads=()):
    """What client 0 says to an order whose header was written by hand."""
    message = Message(json.dumps(told).encode(), payloads)
    content = sealed(Packet(ORDER, fed.served.run, message, {"stage": "9"}), Digests())
    answer, _ = opened(fed.grid.members[0].answer(content), {})
    return answer


def order(**changes):
    made = {"order": "9.0", "round": 8, "task": "train", "arrays": {}, "config": {}, **changes}
    return {"body": made, "arrays": []}


@pytest.mark.parametrize("hide", ["whole", "task"])
def test_a_fetch_however_it_is_wrapped_gives_no_model(hide, enrolled):
    wanted = order(task=FETCH)
    if hide == "whole":
        wanted["body"] = {"$dict": [[k, v] for k, v in wanted["body"].items()]}
    else:
        wanted["body"]["config"] = {"$dict": []}
    answer = ordered(enrolled, wanted)
    assert not answer.message.payloads
    says = "body has reserved names" if hide == "whole" else "does not hand out its personal model"
    assert says in str(answer.message.header) + str(answer.told)
    assert any(says in text for text in enrolled.heard)


def elsewhere(fed):
    """All files but the states of client 0."""
    own = next((fed.root / "site0/runs").iterdir()) / "states/0"
    return {p: p.read_bytes() for p in fed.root.rglob("*") if p.is_file() and p.parent != own}


@pytest.mark.parametrize("name", ["../../../owned", "/tmp/owned", "x\0y", "x" * 300])
@pytest.mark.parametrize("key", ["order", "expects", "keep"])
def test_names_that_are_paths_touch_no_file(key, name, enrolled):
    before, site = elsewhere(enrolled), enrolled.grid.members[0]._runtime
    packed = site.wire.pack({"arrays": {"0": site.plan.start}})
    model = json.loads(packed.header)
    wanted = order(order=f"9.{len(name)}", arrays=model["body"]["arrays"])
    wanted["body"][key] = [name] if key == "keep" else name
    answer = ordered(enrolled, {**wanted, "arrays": model["arrays"]}, packed.payloads)
    assert "not a valid name of a version" in str(answer.message.header) + str(answer.told)
    assert elsewhere(enrolled) == before


def test_a_model_to_start_from_is_not_opened_at_a_client(tmp_path, monkeypatch):
    """Terms that name a file of the client's: it is not looked at."""
    fed = Federation(tmp_path, three())
    fed.serve()
    agreed = next((tmp_path / "site0/runs").iterdir()) / "agreed.json"
    terms = json.loads(agreed.read_text())
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"none of the server's business")
    terms["config"]["model"]["start"] = str(secret)
    packet = Packet("enrol", "f" * 16, Message(b"{}", ()), {"json": json.dumps(terms)})
    with fed.in_memory():
        answer, _ = opened(fed.grid.members[0].answer(sealed(packet, Digests())), {})
    assert answer.kind == "enrol"  # as if it had not been there


@pytest.mark.parametrize("change", ["config", "start"])
def test_the_terms_of_a_run_do_not_change_under_way(change, enrolled):
    (place,) = (enrolled.root / "site1/runs").iterdir()
    before = (place / "agreed.json").read_text()
    terms = json.loads(before)
    if change == "config":
        terms["config"]["train"]["lr"] = 0.5
    else:
        terms["start"] = "0" * 64
    packet = Packet("enrol", place.name, Message(b"{}", ()), {"json": json.dumps(terms)})
    with enrolled.in_memory():
        answer, _ = opened(enrolled.grid.members[1].answer(sealed(packet, Digests())), {})
    assert answer.kind == "refused"
    assert "not the terms that this run began with" in answer.told["text"]
    assert (place / "agreed.json").read_text() == before


def test_a_client_that_wants_secure_sums_takes_part_in_nothing_else(tmp_path):
    fed = Federation(tmp_path, three())
    fed.grid.members[1].secure = True
    result = fed.serve()
    assert result.summary["kept"] == [0, 2]
    assert any("only in runs with secure sums" in text for text in fed.said)
    said = {read(p.answer)["kind"] for p in fed.grid.posts if p.client == 1}
    assert said == {"describe", "refused", "stranger", "missing"}  # no answer to an order


@pytest.mark.parametrize("form", ["csv", "loader"])
def test_neither_a_bad_cell_nor_a_path_leaves_the_client(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for client in range(3):
        lines = ["a,b,kind", *(f"{i},{2 * i},{i % 2}" for i in range(40))]
        if client == 1:
            lines[7] = "1,SECRET DIAGNOSIS,1"
        (tmp_path / f"private-{client}.csv").write_text("\n".join(lines))
    sources = [
        MemberData(tmp_path / f"private-{c}.csv", form="csv", options={"label": "kind"})
        for c in range(3)
    ]
    if form == "loader":
        name = f"failing_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(
            "def read(path):\n    raise ValueError(f'SECRET DIAGNOSIS in {path}')\n"
        )
        sources[1] = MemberData(tmp_path / "private-1.csv", loader=f"{name}:read")
    fed = Federation(tmp_path, three(), sources)
    result = fed.serve(expect=2)
    assert result.summary["kept"] == [0, 2]
    told = "cannot take part: its data cannot be read, or does not fit; its log says more"
    assert sum(told in text for text in fed.said) == 1
    everything = str([p.answer for p in fed.grid.posts]) + str(fed.said)
    assert "SECRET" not in everything
    assert "private-1" not in everything
    assert any("SECRET" in text for text in fed.heard)  # its own log


def test_what_fails_in_training_is_told_without_its_content(tmp_path, monkeypatch):
    from coterie.client.client import Client

    fit = Client.fit

    def failing(self, *given, **more):
        if self.id == 1 and self.round == 1:
            raise ValueError(f"SECRET at {tmp_path}")
        return fit(self, *given, **more)

    monkeypatch.setattr(Client, "fit", failing)
    fed = Federation(tmp_path, three())
    result = fed.serve()
    why = {"1": "task 'train' failed with ValueError; its log says more"}
    assert [e.get("rejected") for e in result.history] == [None, why, None]
    everything = str([p.answer for p in fed.grid.posts]) + str(fed.said)
    assert "SECRET" not in everything
    assert str(tmp_path) not in everything
    assert any("SECRET" in text for text in fed.heard)


# --- clients that lie about their data ------------------------------------------------------------


def describing(**changes):
    def put(content):
        about = json.loads(content["head"]["json"])
        about["data"].update(changes)
        return written({"json": json.dumps(about)})(content)

    return put


DESCRIPTIONS = [
    describing(sizes=[INF, 0, 0]),
    describing(sizes=[2**40, 1, 1]),
    describing(shape=[2**20, 2**20]),
    describing(classes=["c"] * 20_000),
    describing(targets=10**9),
    describing(vocabulary=10**9),
    describing(width=[2**20]),
    written({"json": "[" * 100_000 + "]" * 100_000}),
    written({"json": '{"data":' * 20_000 + "1" + "}" * 20_000}),
    written({"json": "1e999"}),
    written({"kind": "refused", "text": "\x1b]0;owned\x07" + "x" * 10_000}),
    describing(shape=[3, 8, 8]),
]


def test_descriptions_that_cannot_be_keep_only_their_senders_out(tmp_path):
    count = len(DESCRIPTIONS)
    fed = Federation(tmp_path, many(count + 2), secure=True)

    def put(post, content):
        lies = post.kind == "describe" and post.client < count
        return DESCRIPTIONS[post.client](content) if lies else content

    fed.grid.change = put
    result = fed.serve(expect=2)
    assert result.summary["kept"] == [count, count + 1]
    for client in range(count):
        assert any(text.startswith(f"client {client} cannot take part") for text in fed.said)
    assert all(text.isprintable() and len(text) < 500 for text in fed.said)


def test_the_majority_decides_whose_data_is_odd(tmp_path):
    """The first to come does not keep the others out."""
    fed = lying(Federation(tmp_path, many(4)), ("describe", describing(shape=[3, 8, 8])), client=0)
    result = fed.serve(expect=3)
    assert result.summary["kept"] == [1, 2, 3]
    assert "client 0 cannot take part: its data is of shape (3, 8, 8), not (1, 8, 8)" in fed.said


def test_a_member_whose_data_grew_is_described_anew_and_accepted(tmp_path):
    def write(client, count):
        rng = np.random.default_rng(client)
        x = rng.normal(size=(count, 3)).astype(np.float32)
        np.savez(tmp_path / f"{client}.npz", x=x, y=np.arange(count) % 2)

    for client in range(3):
        write(client, 40)
    sources = [MemberData(tmp_path / f"{c}.npz") for c in range(3)]
    fed = Federation(tmp_path, three(run={"rounds": 5}), sources)

    def watch(event):
        if event["round"] == 1:
            write(1, 80)
            fed.restart(1)

    result = fed.serve(watch=watch)
    rejected = [e.get("rejected", {}) for e in result.history]
    assert any("it counts" in r.get("1", "") for r in rejected)  # for one round it seemed to lie
    assert rejected[-1] == {}
    assert [e["lost"] for e in result.history].count(1) == 1
    assert fed.served.samples[1] > fed.served.samples[0]
    assert result.summary["kept"] == [0, 1, 2]


# --- clients that lie about their work ------------------------------------------------------------


def score(**numbers):
    return body(lambda b: b.setdefault("scored", {}).update(metrics=numbers))


def retyped(code, width):
    """A model of numbers of another type, as many as it should have."""

    def put(content):
        packet, _ = opened(content, {})
        header = json.loads(packet.message.header)
        (count,) = header["arrays"][0][1]
        header["arrays"][0] = [code, [count], count * width]
        message = Message(json.dumps(header).encode(), (bytes(count * width),))
        return sealed(replace(packet, message=message), Digests())

    return put


def tiny(content):
    """Nine bytes that a sparse codec would make five thousand million numbers of."""
    header = json.loads(content["head"]["header"])
    for made in header["arrays"]:
        made[1] = [5 * 10**9]
    return written({"header": json.dumps(header).encode()})(content)


LIES = {
    "an array in a mapping": body(lambda b: b.update(arrays={"$dict": [["model", 1]]})),
    "a name that is none": body(lambda b: b.update(metrics={"$dict": [[[1], 2.0]]})),
    "int64": retyped("i8", 8),
    "bool": retyped("b1", 1),
    "a shape": edited(lambda h: h["arrays"][0].__setitem__(1, [10**6, 10**6])),
    "tiny": tiny,
    "nothing": body(lambda b: b["arrays"].clear()),
    "no metrics": body(lambda b: b.pop("metrics")),
    "too large": body(lambda b: b["metrics"].update(loss=10**400)),
    "odd score": score(loss=1.0),
    "reserved score": score(test_worst=1.0),
    "too good": score(test_accuracy=1e9),
    "large score": score(test_loss=10**400),
    "no mapping": score(test_accuracy={"$dict": []}),
    "unknown": body(lambda b: b.update(more=1)),
    "deep": written({"header": b"[" * 50_000 + b"]" * 50_000}),
    "escape": body(lambda b: b.update(error="TrainingError", text="\x1b[2J\n" + "x" * 9999)),
    "odd error": body(lambda b: b.update(error="KeyboardInterrupt", text="stop")),
    "error of none": body(lambda b: b.update(error={"a": 1}, text=["b"])),
    "since": body(lambda b: b.update(since={"model": "unheard of"})),
}


def test_answers_that_lie_cost_only_their_senders(tmp_path):
    fed = Federation(tmp_path, many(len(LIES) + 2, rounds=2))
    puts = list(LIES.values())

    def put(post, content):
        lies = post.order == "1.0" and post.client < len(puts)
        return puts[post.client](content) if lies else content

    fed.grid.change = put
    result = fed.serve()
    first, second = result.history
    assert "abandoned" not in first
    assert [list(LIES)[int(c)] for c in first["rejected"]] == list(LIES)
    assert all(why.isprintable() and len(why) <= 300 for why in first["rejected"].values())
    assert first["lost"] == len(LIES)
    assert "rejected" not in second
    assert result.summary["kept"] == list(range(len(LIES) + 2))


def test_scores_that_lie_are_not_in_the_summary(tmp_path):
    good = body(lambda b: b["metrics"].update(test_accuracy=1e9))
    fed = lying(Federation(tmp_path, three()), ("final.0", good))
    result = fed.serve()
    other = loop(three()).clients
    honest = [other[c]["received_accuracy"] for c in (0, 2)]
    assert result.summary["received"]["accuracy"] == pytest.approx(sum(honest) / 2)
    assert result.summary["lost"] == 1
    assert result.summary["kept"] == [0, 1, 2]


@pytest.mark.parametrize("up", ["topk:share=0.3", "qsgd:levels=7"])
def test_a_few_bytes_do_not_become_many_numbers(up, tmp_path):
    fed = lying(Federation(tmp_path, three(wire={"up": up})), ("2.0", tiny))
    result = fed.serve()
    (why,) = result.history[1]["rejected"].values()
    assert "larger than allowed" in why
    assert "abandoned" not in result.history[1]


@pytest.mark.parametrize("slot", [99.0, -1.0, None], ids=["99", "-1", "none"])
def test_a_group_that_there_is_not_costs_a_round_and_no_more(slot, tmp_path):
    def put(b):
        b["metrics"].pop("slot")
        if slot is not None:
            b["metrics"]["slot"] = slot

    fed = lying(Federation(tmp_path, tree(method={"name": "ifca", "k": 2})), ("2.0", body(put)))
    result = fed.serve()
    assert [bool(e.get("abandoned")) for e in result.history] == [False, True, False]
    assert result.summary["kept"] == [0, 1, 2]
    assert set(result.history[2]["groups"]) <= {0, 1}


def test_user_centric_without_the_numbers_that_it_weighs_by(tmp_path):
    """Before the first round there is nothing to go back to: it ends, and can go on."""
    fed = Federation(tmp_path, three("user-centric"))
    lying(fed, ("init.0", body(lambda b: b["metrics"].clear())))
    with pytest.raises(TrainingError, match=r"KeyError.*: start coterie serve again"):
        fed.serve()
    fed.grid.change = None
    result = fed.serve()
    assert result.summary["kept"] == [0, 1, 2]
    assert_models(fed, loop(three("user-centric")))


SORTING = {"user-centric": {}, "fedclust": {"clusters": 2}, "pacfl": {"clusters": 2}}


@pytest.mark.parametrize("name", SORTING)
def test_one_that_sends_nothing_to_be_sorted_by_is_no_end_of_it(name, tmp_path):
    fed = Federation(tmp_path, tree(method={"name": name, **SORTING[name]}))
    lying(fed, ("init.0", body(lambda b: b["arrays"].clear())))
    result = fed.serve()
    assert result.rounds == 3
    assert not any("abandoned" in e for e in result.history)
    assert {0, 2} <= set(result.summary["kept"])


@pytest.mark.parametrize("name", SORTING)
@pytest.mark.parametrize("answer", ["nothing", "no metrics"])
def test_a_latecomer_that_answers_nothing_stays_outside(name, answer, tmp_path):
    fed = Federation(tmp_path, tree(method={"name": name, **SORTING[name]}))
    empty = body(lambda b: (b["arrays"] if answer == "nothing" else b["metrics"]).clear())
    asked = []

    def put(post, content):
        if post.client == 2 and "admit" in post.order:
            asked.append(post.order)
            return empty(content)
        return content

    fed.grid.change, fed.grid.away = put, {2}

    def watch(event):
        fed.grid.away = set()

    result = fed.serve(expect=2, watch=watch)
    assert asked
    assert {0, 1} <= set(result.summary["kept"])
    assert result.rounds == 3
    if answer == "nothing":
        assert all(e["cohort"] == [0, 1] for e in result.history)


# --- methods that honest clients answer differently -----------------------------------------------


def test_secure_groups_of_different_sizes_stay(tmp_path):
    """Members of sums of four and of three send arrays of different lengths, as is right."""
    made = many(7, rounds=2, method={"name": "ifca", "k": 2}, shift={"name": "rotation"})
    made["shift"]["groups"], made["data"]["samples"], made["run"]["seed"] = 2, 7 * 40, 2
    privacy = {"secure": True, "randomness": "system"}
    fed = Federation(tmp_path, {**made, "privacy": privacy}, secure=True)
    result = fed.serve()
    wanted = loop(made, salts=fed.salts)
    assert all("rejected" not in e and not e["lost"] for e in result.history)
    assert sorted(map(list(result.groups.values()).count, (0, 1))) == [3, 4]
    assert result.groups == wanted.groups
    for client in range(7):
        for name, tensor in wanted.weights(client).tensors().items():
            assert torch.allclose(fed.model(client)[name], tensor, rtol=0, atol=1e-4)


def test_pacfl_among_clients_of_different_sizes_gives_the_bits_of_the_loop(tmp_path):
    """Who has fewer samples sends fewer vectors, and is no misfit for it."""
    made = tree(4, method={"name": "pacfl", "clusters": 2, "p": 12}, data={"samples": 60})
    made["partition"] = {"name": "quantity", "alpha": 0.5}
    fed = Federation(tmp_path, made)
    result, wanted = fed.serve(), fed.loop()
    assert len(set(fed.served.samples.values())) > 1
    assert all("rejected" not in e for e in result.history)
    assert_models(fed, wanted)
    assert result.groups == wanted.groups


# --- clients that say nothing ---------------------------------------------------------------------


def silent(fed, client, *kinds):
    """A client that is connected and answers none of these."""
    reply = fed.grid._reply

    def quiet(name):
        post = fed.grid._open.get(name)
        if post is not None and post.client == client and {post.kind, post.order} & set(kinds):
            return []
        return reply(name)

    fed.grid._reply = quiet


@pytest.mark.parametrize("when", ["final.0", "final.1"])
@pytest.mark.parametrize(("deadline", "most"), [({"real_deadline": 60.0}, 62), ({}, 3602)])
def test_one_that_is_silent_at_the_end_is_waited_for_once(when, deadline, most, tmp_path):
    fed = Federation(tmp_path, three(run=deadline))
    silent(fed, 1, *([when] if when == "final.0" else [f"final.{n}" for n in range(1, 200)]))
    began = fed.clock.now
    result = fed.serve()
    waited = fed.clock.now - began
    if when == "final.0":
        assert result.summary["kept"] == [0, 1, 2]
        assert most - 2 <= waited <= most
    else:
        assert result.summary["kept"] == [0, 2]
        assert waited <= 2 * most + 95


@pytest.mark.parametrize("secure", [False, True])
def test_a_silent_newcomer_does_not_cost_every_round(secure, tmp_path):
    fed = Federation(tmp_path, three(run={"rounds": 8}), secure=secure)
    silent(fed, 2, "describe")
    fed.grid.away = {2}

    def watch(event):
        fed.grid.away = set()

    began = fed.clock.now
    result = fed.serve(expect=2, watch=watch)
    assert result.rounds == 8
    asked = [c for c, _ in fed.grid.orders("describe")].count(2)
    assert asked == 1  # in so short a time
    assert fed.clock.now - began <= 21


def test_a_silent_client_does_not_keep_the_others_from_beginning(tmp_path):
    fed = Federation(tmp_path, three())
    silent(fed, 1, "describe")
    began = fed.clock.now
    assert fed.serve(expect=2).summary["kept"] == [0, 2]
    assert fed.clock.now - began < 400


# --- ends and beginnings --------------------------------------------------------------------------


class Cut(BaseException):
    """The server dies."""


@pytest.mark.parametrize("known", [True, False])
def test_killed_when_some_have_their_model_it_asks_only_the_others(known, tmp_path):
    """``known``: whether the server had written down who has its model when it was killed."""
    fed = Federation(tmp_path, three("ditto"))
    answer = fed.grid._reply

    def dying(name):
        post = fed.grid._open[name]
        if known and post.order == "final.0":
            fed.grid.away = {2}  # when it comes to models, it is not there
        if not known and (post.order, post.client) == ("final.1", 2):
            raise Cut
        return answer(name)

    def slept(seconds):
        if fed.grid.away:
            raise Cut

    sleep, fed.clock.sleep, fed.grid._reply = fed.clock.sleep, slept, dying
    with pytest.raises(Cut):
        fed.serve()
    before = RunDir(tmp_path / "served").read_result()
    assert before.get("kept", []) == ([0, 1] if known else [])
    fed.clock.sleep, fed.grid._reply = sleep, answer
    fed.grid.posts.clear()
    fed.grid.mend()
    fed.grid.away = {0}  # it has its model, and has left
    began = fed.clock.now
    result = fed.serve()
    assert {c for c, _ in fed.grid.orders()} == ({2} if known else {1, 2})
    assert result.summary["kept"] == ([0, 1, 2] if known else [1, 2])
    assert fed.clock.now - began < 185  # time to come back, and for the farewell
    assert_models(fed, loop(three("ditto")))
    told = {k: v for k, v in result.summary.items() if k != "kept"}
    assert told == {k: v for k, v in before.items() if k != "kept"}


def test_one_whose_folder_is_gone_goes_on_without_its_state(tmp_path):
    fed = Federation(tmp_path, three("ditto", run={"rounds": 5}))

    def watch(event):
        if event["round"] == 1:
            shutil.rmtree(tmp_path / "site1")
            fed.restart(1)

    result = fed.serve(watch=watch)
    lost = [e["lost"] for e in result.history]
    assert sum(lost) <= 2
    assert lost[-1] == 0
    assert result.summary["kept"] == [0, 1, 2]
    assert str(tmp_path) not in str(result.history)


def test_two_servers_in_one_folder_are_refused(tmp_path):
    fed, refused = Federation(tmp_path, three()), []

    def watch(event):
        told = Serving(fed.config, tmp_path / "served", None)
        with pytest.raises(RunDirError) as why:
            serve(told, None, fed.said.append)
        refused.append(str(why.value))

    fed.serve(watch=watch)
    assert refused


def test_what_the_method_refuses_leaves_the_folder(tmp_path, monkeypatch):
    """Clients have agreed to this run: its folder is what it goes on from."""
    from coterie.experiment import config

    made = config.method_of

    def refusing(fed, setup):
        raise ConfigError("not with these clients")

    with monkeypatch.context() as patch:
        patch.setattr(config, "method_of", lambda asked: replace(made(asked), init=refusing))
        fed = Federation(tmp_path, three())
        with pytest.raises(ConfigError, match="not with these clients"):
            fed.serve()
    result = fed.serve()
    assert result.summary["kept"] == [0, 1, 2]
    assert len(list((tmp_path / "site0/runs").iterdir())) == 1  # the same run
