"""Worker processes: real ones, killed for real."""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import coterie
from coterie.channel.channel import Channel
from coterie.channel.wire import Wire
from coterie.client.client import Client
from coterie.core.engine import Request
from coterie.core.messages import Order, Upload
from coterie.core.method import Method, Round, State
from coterie.engines import pool as pool_module
from coterie.engines.base import units
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.errors import EngineError, TrainingError
from coterie.experiment.experiment import execute
from support import digits, drive, experiment, models, same_bits


def with_task(method: Method, wrap) -> Method:
    """The same method with its training task wrapped."""
    return replace(method, tasks={"train": wrap(method.tasks["train"])})


def dying(folder: Path, client: int, times: int, death):
    """Wraps a task: this client's work ends its process, after its state was written to disk."""

    def wrap(task):
        def fatal(c: Client, arrays, config) -> Upload:
            upload = task(c, arrays, config)
            marks = folder / f"{c.id}-{c.round}"
            if c.id == client and c.round == 1:
                tries = int(marks.read_text()) if marks.exists() else 0
                marks.write_text(str(tries + 1))
                if tries < times:
                    death()
            return upload

        return fatal

    return wrap


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    faulthandler.disable()  # no dump for a crash that is meant
    ctypes.string_at(0)


@pytest.mark.parametrize("death", [killed, segfault])
@pytest.mark.parametrize("name", ["fedper", "fedavg"])
def test_a_worker_that_dies_is_replaced_and_nothing_changes(name, death, tmp_path):
    plain = experiment(getattr(coterie, name)())
    state, channel, _ = drive(plain, tmp_path / "plain")
    expected = models(plain, state, channel)

    marks = tmp_path / "marks"
    marks.mkdir()
    made = experiment(with_task(getattr(coterie, name)(), dying(marks, 2, 2, death)))
    engines = []

    def start(plan):
        engines.append(Pool(plan, 2))
        return engines[0]

    state, channel, pool = drive(made, tmp_path / "pool", start)
    found = models(made, state, channel)
    pool.close()
    assert (marks / "2-1").read_text() == "3"
    assert same_bits(found, expected)
    assert channel.state.ledger.lost == 0


def test_an_order_that_kills_three_workers_is_a_lost_reply(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    made = experiment(with_task(coterie.fedper(), dying(marks, 2, 99, killed)))
    state, channel, pool = drive(made, tmp_path / "pool", lambda plan: Pool(plan, 2))
    found = models(made, state, channel)
    pool.close()
    assert (marks / "2-1").read_text() == "3"
    assert channel.state.ledger.lost == 1

    from faulty import Faulty

    plain = experiment(coterie.fedper())
    state, lossy, _ = drive(
        plain,
        tmp_path / "loop",
        lambda plan: Faulty(Loop(plan), lose_order=lambda c, o: (c, o) == (2, "2.0")),
    )
    assert same_bits(found, models(plain, state, lossy))


def test_workers_killed_from_outside_while_idle_and_while_busy(tmp_path):
    made = experiment(coterie.fedavg(), settings={"rounds": 6})
    plan = made.plan(tmp_path / "a")
    pool = Pool(plan, 3)
    channel = Channel(pool, Wire(plan.start.layout))
    state = made.method.init(channel, made.setup(plan.start))
    for number in range(6):
        for worker in pool._workers:  # all of them, before every round
            os.kill(worker.process.pid, signal.SIGKILL)
            if number % 2:
                worker.process.join()  # dead already when it is sent work; else perhaps dying
        channel.begin(number)
        state = made.method.round(channel, state, Round(number, range(6)))
    found = models(made, state, channel)
    pool.close()
    assert channel.state.ledger.lost == 0  # nobody died of the work
    plain, channel, _ = drive(made, tmp_path / "b")
    assert same_bits(found, models(made, plain, channel))


def test_scoring_survives_a_killed_worker_with_the_same_scores(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()

    def fatal_once(outputs, y):
        if os.getpid() != parent and not (marks / "done").exists():
            (marks / "done").touch()
            killed()
        return 1.0

    parent = os.getpid()
    made = experiment(coterie.fedavg(), metrics={"mine": fatal_once})
    plan = made.plan(tmp_path)
    sends = {c: {"0": plan.start} for c in range(6)}
    pool = Pool(plan, 1)
    loop, channel = (
        Channel(Loop(plan), Wire(plan.start.layout)),
        Channel(pool, Wire(plan.start.layout)),
    )
    for each in (loop, channel):
        each.begin(0)
    assert channel.score(sends, {}) == loop.score(sends, {})
    assert (marks / "done").exists()
    assert channel.state.ledger.lost == 0
    pool.close()


@pytest.mark.parametrize("engine", ["loop", "pool"])
def test_a_model_that_fails_while_scoring_says_why(engine):
    class Moody(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def forward(self, x):
            if not self.training:
                raise ValueError("not today")
            return self.layer(x.flatten(1))

    made = experiment(coterie.fedavg(), model=Moody, settings={"engine": engine})
    with pytest.raises(TrainingError, match="ValueError: not today"):
        execute(made)


def test_a_pool_needs_workers(tmp_path):
    with pytest.raises(coterie.CoterieError, match="must be 1 or more"):
        Pool(experiment(coterie.fedavg()).plan(tmp_path), -1)


def test_each_distinct_model_is_sent_once_to_each_worker(tmp_path, monkeypatch):
    blobs = []
    original = Pool._send

    def counting(self, worker, unit, numbers):
        pipe, sent = worker.pipe, []

        class Pipe:
            def send_bytes(self, frame):
                if frame[:1] == pool_module._BLOB:
                    sent.append(len(frame) - 5)
                pipe.send_bytes(frame)

        worker.pipe = Pipe()
        try:
            original(self, worker, unit, numbers)
        finally:
            worker.pipe = pipe
        blobs.extend((worker.process.pid, size) for size in sent)

    monkeypatch.setattr(Pool, "_send", counting)
    made = experiment(coterie.fedavg(), digits(clients=10))
    state, channel, pool = drive(made, tmp_path, lambda plan: Pool(plan, 2), rounds=1)
    assert len(blobs) == len(set(blobs)) <= 2
    blobs.clear()
    channel.begin(5)
    channel.score({c: made.method.sends(state, c) for c in range(10)}, {})
    assert len(blobs) <= 2
    pool.close()


def test_work_is_dealt_largest_first_and_scores_in_batches():
    def request(client, together=False, payload=b"m"):
        from coterie.channel.wire import Message

        return Request(client, Message(b"{}", (payload,)), together)

    sizes = {0: 5, 1: 50, 2: 20, 3: 50}
    order = units([request(c) for c in range(4)], sizes, sizes)
    assert [[r.client for r in u] for u in order] == [[1], [3], [2], [0]]
    shared = b"model"
    held = dict.fromkeys(range(5), 400)
    batches = units([request(c, True, shared) for c in (4, 2, 0, 1, 3)], held, held)
    assert [[r.client for r in u] for u in batches] == [[0, 1, 2], [3, 4]]
    own = units([request(c, True, bytes([c])) for c in range(3)], held, held)
    assert [[r.client for r in u] for u in own] == [[0], [1], [2]]


def test_spawned_workers_give_the_same_bits_and_take_methods_by_name(tmp_path, monkeypatch):
    made = experiment(coterie.fedper(), model=_plain_network)
    state, channel, _ = drive(made, tmp_path / "a", rounds=2)
    expected = models(made, state, channel)
    monkeypatch.setattr(pool_module.sys, "platform", "darwin")
    state, channel, pool = drive(made, tmp_path / "b", lambda plan: Pool(plan, 2), rounds=2)
    found = models(made, state, channel)
    pool.close()
    assert same_bits(found, expected)
    with pytest.raises(EngineError, match=r"not made by a @coterie.method factory"):
        drive(
            experiment(replace(coterie.fedavg(), source=None)),
            tmp_path / "c",
            lambda plan: Pool(plan, 1),
        )


def _plain_network():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def test_workers_end_with_the_pool_and_leave_nothing(tmp_path):
    pool = Pool(experiment(coterie.fedavg()).plan(tmp_path), 3)
    pids = pool.pids
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_closing_stops_busy_workers(tmp_path):
    def endless(task):
        def work(client, arrays, config):
            time.sleep(600)

        return work

    made = experiment(with_task(coterie.fedavg(), endless))
    plan = made.plan(tmp_path)
    pool = Pool(plan, 1)
    channel = Channel(pool, Wire(plan.start.layout))
    channel.begin(0)
    _, requests = channel.prepare([Order(0, "train", {"0": plan.start})], {})

    def impatient(signum, frame):
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, impatient)
    left = signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(TimeoutError):
            list(pool.exchange(requests))
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *left)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 5


def test_a_worker_that_cannot_start_is_an_engine_error(tmp_path):
    made = experiment(coterie.fedavg())
    plan = replace(made.plan(tmp_path), bn="nonsense")
    with pytest.raises(EngineError, match="ended while starting"):
        Pool(plan, 1)


@pytest.mark.parametrize("engine", ["loop", "pool"])
def test_a_task_that_raises_is_named(engine, tmp_path):
    def broken(task):
        def work(client, arrays, config):
            if client.id == 4:
                raise ValueError("no such thing")
            return task(client, arrays, config)

        return work

    made = experiment(with_task(coterie.fedavg(), broken), settings={"engine": engine})
    with pytest.raises(TrainingError, match=r"client 4: task 'train' failed with ValueError: no"):
        execute(made)


@pytest.mark.parametrize("engine", ["loop", "pool"])
def test_a_reply_that_is_not_finite_is_refused_by_name(engine):
    def spoiled(task):
        def work(client, arrays, config):
            upload = task(client, arrays, config)
            if client.id == 3:
                return Upload({"model": upload.arrays["model"] * float("nan")}, upload.metrics)
            return upload

        return work

    method, settings = with_task(coterie.fedavg(), spoiled), {"engine": engine, "rounds": 2}
    with pytest.raises(TrainingError, match="client 3, round 1: 'model'"):
        execute(experiment(method, settings={**settings, "outliers": "off"}))
    told = [e["rejected"] for e in execute(experiment(method, settings=settings)).history]
    assert [list(left_out) for left_out in told] == [["3"], ["3"]]


def test_two_orders_for_one_client_are_refused(tmp_path):
    plan = experiment(coterie.fedavg()).plan(tmp_path)
    channel = Channel(Loop(plan), Wire(plan.start.layout))
    channel.begin(0)
    with pytest.raises(coterie.CoterieError, match="one order in an exchange"):
        channel.gather([Order(0, "train"), Order(0, "train")])
    with pytest.raises(coterie.CoterieError, match="has no task 'dance'"):
        channel.gather([Order(0, "dance")])


def test_gather_shows_each_reply_and_is_recorded_as_such(tmp_path):
    made = experiment(coterie.fedavg())
    plan = made.plan(tmp_path)
    channel = Channel(Loop(plan), Wire(plan.start.layout))
    channel.begin(0)
    replies = channel.gather([Order(c, "train", {"0": plan.start}) for c in (3, 1)])
    assert [r.client for r in replies] == [1, 3]
    assert channel.exposed == {"each"}
    assert isinstance(State().groups, dict)


def test_results_and_events_do_not_depend_on_the_engine(tmp_path):
    outcomes = []
    for name, workers in (("loop", None), ("pool", 1), ("pool", 3)):
        made = experiment(
            coterie.ifca(k=2),
            settings={"engine": name, "workers": workers, "cohort": 0.5, "alone": True},
        )
        outcomes.append(execute(made))
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other.clients == first.clients
        for a, b in zip(first.history, other.history, strict=True):
            assert {k: v for k, v in a.items() if k != "seconds"} == {
                k: v for k, v in b.items() if k != "seconds"
            }


# --- killed while starting ------------------------------------------------------------------------


def killed_while_starting(marks: Path, times: int, monkeypatch) -> None:
    """The first so many workers are killed before they are ready; a file counts who started."""
    honest = pool_module.settle

    def settle(parent, others):
        honest(parent, others)
        with (marks / "started").open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len((marks / "started").read_text().splitlines()) <= times:
            killed()

    monkeypatch.setattr(pool_module, "settle", settle)


def started(marks: Path) -> int:
    return len((marks / "started").read_text().splitlines())


def test_a_worker_killed_while_starting_is_replaced_and_nothing_changes(tmp_path, monkeypatch):
    made = experiment(coterie.fedper())
    state, channel, _ = drive(made, tmp_path / "loop")
    expected = models(made, state, channel)
    killed_while_starting(tmp_path, 2, monkeypatch)
    state, channel, pool = drive(made, tmp_path / "pool", lambda plan: Pool(plan, 1))
    found = models(made, state, channel)
    pool.close()
    assert started(tmp_path) == 3
    assert same_bits(found, expected)
    assert channel.state.ledger.lost == 0


def test_one_that_takes_a_dead_workers_place_may_be_killed_too(tmp_path, monkeypatch):
    made = experiment(coterie.fedavg())
    state, channel, _ = drive(made, tmp_path / "loop")
    expected = models(made, state, channel)
    plan = made.plan(tmp_path / "pool")
    pool = Pool(plan, 2)
    killed_while_starting(tmp_path, 2, monkeypatch)
    os.kill(pool.pids[0], signal.SIGKILL)
    state, channel, _ = drive(made, tmp_path / "pool", lambda plan: pool)
    found = models(made, state, channel)
    pool.close()
    assert started(tmp_path) == 3
    assert same_bits(found, expected)


def test_workers_that_are_always_killed_while_starting_end_the_run_with_a_sentence(
    tmp_path, monkeypatch
):
    killed_while_starting(tmp_path, 99, monkeypatch)
    with pytest.raises(EngineError, match=r"3 worker .* killed while starting \(signal 9\)"):
        Pool(experiment(coterie.fedavg()).plan(tmp_path), 1)
    assert started(tmp_path) == 3


SPAWNED = """
import os, signal, sys
from pathlib import Path

folder = Path(sys.argv[1]) / os.environ.get("KILLS", "")
marks = folder / "started"
if __name__ == "__mp_main__":  # a spawned worker that imports the script
    with marks.open("a") as file:
        file.write("x\\n")
    if len(marks.read_text().splitlines()) <= int(os.environ["KILLS"]):
        os.kill(os.getpid(), signal.SIGKILL)

import torch


def network():  # more than a pipe holds
    first, last = torch.nn.Linear(64, 400), torch.nn.Linear(400, 10)
    return torch.nn.Sequential(torch.nn.Flatten(), first, last)


if __name__ == "__main__":
    import coterie
    from coterie.engines.pool import Pool
    from support import drive, experiment, models, same_bits

    made = experiment(coterie.fedavg(), model=network)
    state, channel, _ = drive(made, folder / "loop", rounds=1)
    expected = models(made, state, channel)
    sys.platform = "darwin"
    for kills in ("1", "99"):
        os.environ["KILLS"] = kills
        place = folder / kills
        place.mkdir()
        try:
            state, channel, pool = drive(made, place, lambda plan: Pool(plan, 1), rounds=1)
        except coterie.CoterieError as error:
            print(error)
        else:
            print("same bits" if same_bits(models(made, state, channel), expected) else "others")
            pool.close()
"""


def test_a_spawned_worker_killed_while_it_imports_is_replaced(tmp_path):
    """It dies before it has read what it was sent: nobody may wait for it to do so."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    command = [sys.executable, str(script), str(tmp_path)]
    paths = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    once, always = done.stdout.splitlines()
    assert once == "same bits", done.stderr
    assert always.startswith("3 worker processes in a row were"), done.stderr
    assert (started(tmp_path / "1"), started(tmp_path / "99")) == (2, 3)
