"""The Ray engine's own logic, on a stand-in for Ray whose actors are objects of this process.

It is quick, and lets a test decide which call an actor dies of. Real actors are in test_ray.py.
"""

import gc
import pickle
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

import coterie
from coterie.channel.channel import Channel
from coterie.channel.wire import Wire
from coterie.core.method import Round
from coterie.engines import ray as engine_module
from coterie.engines.loop import Loop
from coterie.engines.ray import RayEngine
from coterie.errors import EngineError
from faulty import Faulty
from support import ROWS, experiment, models, same_bits


class Gone(Exception):
    """An actor died."""


class Call:
    """What a call of an actor will give, once somebody waits for it; or a value that was put."""

    def __init__(self, work):
        self.work, self.done = work, False

    def carry_out(self):
        if not self.done:
            self.done = True
            try:
                self.value, self.error = self.work(), None
            except Gone as error:
                self.error = error


class Pretended:
    """As much of Ray as the engine uses. ``fatal(number, name, call)`` decides who dies of what."""

    exceptions = SimpleNamespace(
        RayError=Gone, RayActorError=Gone, WorkerCrashedError=Gone, ObjectStoreFullError=Gone
    )
    cloudpickle = pickle

    def __init__(self, fatal=lambda actor, name, call: False):
        self.fatal, self.calls, self.actors, self.puts, self.turn, self.sent = fatal, 0, 0, 0, 0, []

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "NodeManagerAddress": "here", "Resources": {"CPU": 9.0}}]

    def put(self, value):
        self.puts += 1
        return Call(lambda: value)

    def remote(self, **options):
        def made(kind):
            self.actors += 1
            return SimpleNamespace(remote=lambda: self._actor(kind(), self.actors))

        return made

    def _actor(self, thing, number):
        handle = SimpleNamespace(alive=True)

        def method(name):
            def call(*args):
                def work():
                    if not handle.alive:
                        raise Gone
                    self.calls += 1
                    if dies := self.fatal(number, name, self.calls):
                        if dies == "after":
                            getattr(thing, name)(*map(self._seen, args))
                        handle.alive = False
                        raise Gone
                    return getattr(thing, name)(*map(self._seen, args))

                self.sent.append((number, name, args))
                return Call(work)

            return SimpleNamespace(remote=call)

        for name in ("enter", "begin", "answer", "leave"):
            setattr(handle, name, method(name))
        return handle

    def _seen(self, argument):
        if isinstance(argument, Call):
            argument.carry_out()
            return argument.value
        return argument

    def get(self, call):
        call.carry_out()
        if call.error:
            raise call.error
        return call.value

    def wait(self, calls, num_returns=1, timeout=None):
        self.turn += 1  # each in its turn, so that everybody gets some of the work
        order = calls[self.turn % len(calls) :] + calls[: self.turn % len(calls)]
        for call in order[:num_returns]:
            call.carry_out()
        return order[:num_returns], order[num_returns:]

    def kill(self, actor):
        actor.alive = False


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    monkeypatch.setattr(gc, "freeze", lambda: None)
    own = iter(range(1000))
    place = tmp_path / "own"
    place.mkdir()

    def folder(number):
        made = place / str(next(own))
        made.mkdir()
        return made

    monkeypatch.setattr(engine_module, "_worker_folder", folder)

    def with_fate(fatal=lambda actor, name, call: False):
        ray = Pretended(fatal)
        monkeypatch.setattr(engine_module, "imported", lambda: ray)
        return ray

    return with_fate


def rounds(made, folder, start):
    plan = made.plan(folder)
    engine = start(plan)
    channel = Channel(engine, Wire(plan.start.layout), terms=made.terms(plan.start))
    channel.begin(0, stage="init")
    state = made.method.init(channel, made.setup(plan.start))
    for number in range(3):
        channel.begin(number)
        info = Round(number, range(6), made.public, budget=made.settings.stop.budget)
        state = replace(made.method.round(channel, state, info), notes={})
    found = models(made, state, channel)
    engine.close()
    return found, channel.state.ledger.lost, sorted(p.name for p in folder.rglob("*.state"))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "ifca", "fedfomo"])
def test_same_bits_and_the_same_files_whoever_dies(name, apart, pretend, tmp_path):
    """Every seventh call kills its actor, some of them only when the work is done."""
    made = experiment(ROWS[name]())
    expected = rounds(made, tmp_path / "loop", Loop)

    def fatal(actor, method, call):
        return method == "answer" and call % 7 == 0 and ("after" if call % 2 else "before")

    ray = pretend(fatal)
    found = rounds(made, tmp_path / "ray", lambda plan: RayEngine(plan, 2, apart=apart))
    assert ray.actors > 3
    assert same_bits(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_an_order_that_kills_three_actors_is_lost(pretend, tmp_path):
    made = experiment(coterie.fedper())
    tries = []

    def fatal(actor, method, call):
        if method == "answer" and (work := ray.sent_to(call)) == (2, "2.0"):
            tries.append(work)
            return "after"
        return False

    ray = pretend(fatal)
    ray.sent_to = lambda call: next(
        (args[0][0][0], '"order":"2.0"' in args[0][0][1].decode() and "2.0")
        for _, name, args in reversed(ray.sent)
        if name == "answer"
    )
    found = rounds(made, tmp_path / "ray", lambda plan: RayEngine(plan, 1, apart=True))
    lossy = rounds(
        made,
        tmp_path / "loop",
        lambda plan: Faulty(Loop(plan), lose_order=lambda c, o: (c, o) == (2, "2.0")),
    )
    assert len(tries) == 3
    assert same_bits(found[0], lossy[0])
    assert found[1] == 1


def test_an_idle_actors_death_is_nobodys_fault(pretend, tmp_path):
    made = experiment(coterie.fedavg())
    expected = rounds(made, tmp_path / "loop", Loop)
    ray = pretend(lambda actor, method, call: method == "begin")  # at every exchange, all of them
    found = rounds(made, tmp_path / "ray", lambda plan: RayEngine(plan, 2))
    assert same_bits(found[0], expected[0])
    assert found[1] == 0
    assert ray.actors > 8


def test_actors_that_die_while_they_start_are_replaced(pretend, tmp_path):
    made = experiment(coterie.fedper())
    expected = rounds(made, tmp_path / "loop", Loop)
    deaths = []

    def fatal(actor, method, call):
        if method == "enter" and len(deaths) < 2:
            deaths.append(actor)
            return "before"
        return False

    pretend(fatal)
    found = rounds(made, tmp_path / "ray", lambda plan: RayEngine(plan, 2))
    assert len(deaths) == 2
    assert same_bits(found[0], expected[0])
    assert found[1] == 0


def test_who_never_comes_up_ends_the_run(pretend, tmp_path):
    ray = pretend(lambda actor, method, call: method == "enter")
    with pytest.raises(EngineError, match="could not be started"):
        RayEngine(experiment(coterie.fedavg()).plan(tmp_path), 2)
    assert ray.actors == 4  # two, and two in the places of the dead


def test_arrays_are_put_once_and_sent_once_to_each(pretend, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "INLINE", 0)
    made = experiment(coterie.fedavg())
    ray = pretend()
    plan = made.plan(tmp_path)
    engine = RayEngine(plan, 2)
    assert ray.puts == 1  # the data, for both
    channel = Channel(engine, Wire(plan.start.layout))
    channel.begin(0)
    state = made.method.init(channel, made.setup(plan.start))
    made.method.round(channel, state, Round(0, range(6)))
    assert ray.puts == 2  # the model, for all six
    blobs = [(number, n) for number, name, args in ray.sent if name == "answer" for n in args[2]]
    assert sorted(blobs) == [(1, 0), (2, 0)]
    engine.close()


def test_copies_go_only_to_those_that_lack_them(pretend, tmp_path):
    """One worker has made every version itself: nothing is ever sent to it."""
    ray = pretend()
    made = experiment(coterie.fedper())
    rounds(made, tmp_path / "one", lambda plan: RayEngine(plan, 1, apart=True))
    assert not any(args[1] for _, name, args in ray.sent if name == "answer")
    ray = pretend(lambda actor, name, call: name == "begin")  # now they always lack all
    rounds(made, tmp_path / "two", lambda plan: RayEngine(plan, 1, apart=True))
    assert any(args[1] for _, name, args in ray.sent if name == "answer")


def test_a_deadline_in_the_past_loses_everything_and_stops_nobody_for_good(pretend, tmp_path):
    made = experiment(coterie.fedavg())
    pretend()
    plan = made.plan(tmp_path)
    engine = RayEngine(plan, 2)
    channel = Channel(engine, Wire(plan.start.layout))
    channel.begin(0)
    state = made.method.init(channel, made.setup(plan.start))
    orders = [coterie.Order(c, "train", made.method.sends(state, c)) for c in range(6)]
    _, requests = channel.prepare(orders, {})
    assert dict(engine.exchange(requests, 0.0)) == dict.fromkeys(range(6))
    answers = engine.exchange(requests)
    next(answers)
    answers.close()  # broken off: whoever was at work is replaced
    assert len(engine.pids) < 2
    assert sorted(c for c, a in engine.exchange(requests) if a is not None) == list(range(6))
    engine.close()


def test_workers_folders_are_cleared_away(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module.tempfile, "gettempdir", lambda: str(tmp_path))
    dead = tmp_path / "coterie-abc-999999999"
    dead.mkdir()
    other = tmp_path / "coterie-def-999999999"
    other.mkdir()
    own = engine_module._worker_folder("abc")
    assert own.stat().st_mode & 0o777 == 0o700
    assert not dead.exists()
    assert other.exists()
    shutil.rmtree(own)
