"""Workers on Ray: real actors, killed for real."""

import os
import pickle
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import coterie
from coterie.channel.channel import Channel
from coterie.channel.wire import Wire
from coterie.core.method import Round
from coterie.data import Population
from coterie.engines import ray as engine_module
from coterie.engines.loop import Loop
from coterie.engines.ray import RayEngine, check_token
from coterie.engines.shared_plan import load_plan, share
from coterie.engines.workers import portable
from coterie.errors import ConfigError, EngineError
from coterie.experiment.experiment import execute
from deadly import __file__ as deadly_file
from deadly import deadly, sleepy
from faulty import Faulty
from support import ROWS, digits, drive, experiment, models, same_bits

pytest.importorskip("ray", reason="Ray is not installed: pip install 'coterie[ray]'")
e2e = pytest.mark.e2e


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """A Ray that the program has started itself: engines use it, and leave it alone."""
    ray = engine_module.imported()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("PYTHONPATH", str(Path(deadly_file).parent), prepend=os.pathsep)
        check_token(None)
        ray.init(
            address="local",
            num_cpus=3,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200_000_000,
            logging_level="ERROR",
        )
        yield ray
        ray.shutdown()


def rounds(made, folder, start, disturb=lambda engine, number: None):
    """The clients' models after the rounds of an experiment, and the channel."""
    plan = made.plan(folder)
    engine = start(plan)
    try:
        channel = Channel(engine, Wire(plan.start.layout))
        channel.begin(0, stage="init")
        state = made.method.init(channel, made.setup(plan.start))
        for number in range(made.settings.rounds):
            disturb(engine, number)
            channel.begin(number)
            state = made.method.round(channel, state, Round(number, range(6)))
        return models(made, state, channel), channel
    finally:
        engine.close()


def kill(pid):
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["scaffold", pytest.param("fedavg", marks=e2e)])
def test_workers_that_are_killed_lose_nothing_and_change_nothing(ray, name, tmp_path):
    """In the second round one of the workers dies; in the third, for FedAvg, all do."""
    made = experiment(ROWS[name](), settings={"rounds": 3 if name == "fedavg" else 2})
    expected, _ = rounds(made, tmp_path / "loop", Loop)
    killed = []

    def disturb(engine, number):
        for pid in engine.pids[:number]:
            killed.append(pid)
            kill(pid)

    found, channel = rounds(made, tmp_path / "ray", lambda plan: RayEngine(plan, 2), disturb)
    assert len(set(killed)) >= made.settings.rounds - 1
    assert same_bits(found, expected)
    assert channel.state.ledger.lost == 0
    assert ray.is_initialized()  # it was not ours to end
    assert not (tmp_path / "ray" / engine_module.MARK).exists()


def test_state_travels_where_storage_is_not_shared_and_survives_a_worker(ray, tmp_path):
    made = experiment(ROWS["ditto"](), settings={"rounds": 2})
    expected, _ = rounds(made, tmp_path / "loop", Loop)
    found, channel = rounds(
        made,
        tmp_path / "ray",
        lambda plan: RayEngine(plan, 2, apart=True),
        lambda engine, number: number and kill(engine.pids[0]),
    )
    assert same_bits(found, expected)
    assert channel.state.ledger.lost == 0
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "loop")


def files_of(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.state"))


@e2e
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "ditto", "ifca", "fedper", "dc-pfl", "group-evidence"]
)
def test_same_bits_for_any_number_of_actors(ray, name, workers, tmp_path):
    made = experiment(ROWS[name](), settings={"cohort": 0.7})
    state, channel, _ = drive(made, tmp_path / "loop")
    expected = models(made, state, channel)
    state, channel, engine = drive(made, tmp_path / "ray", lambda plan: RayEngine(plan, workers))
    found = models(made, state, channel)
    engine.close()
    assert same_bits(found, expected)
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "loop")


@e2e
@pytest.mark.parametrize("apart", [False, True])
def test_a_worker_that_dies_of_its_work_is_replaced(ray, apart, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    expected, _ = rounds(experiment(ROWS["scaffold"]()), tmp_path / "loop", Loop)
    made = experiment(deadly("scaffold", str(marks), 2, 2), schedule={"momentum": 0.0})
    found, channel = rounds(made, tmp_path / "ray", lambda plan: RayEngine(plan, 2, apart=apart))
    assert (marks / "2-1").read_text() == "3"
    assert same_bits(found, expected)
    assert channel.state.ledger.lost == 0


@e2e
@pytest.mark.parametrize("apart", [False, True])
def test_an_order_that_kills_three_workers_is_a_lost_reply(ray, apart, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    made = experiment(deadly("fedper", str(marks), 2, 99))
    found, channel = rounds(made, tmp_path / "ray", lambda plan: RayEngine(plan, 2, apart=apart))
    assert (marks / "2-1").read_text() == "3"
    assert channel.state.ledger.lost == 1
    expected, _ = rounds(
        experiment(coterie.fedper()),
        tmp_path / "loop",
        lambda plan: Faulty(Loop(plan), lose_order=lambda c, o: (c, o) == (2, "2.0")),
    )
    assert same_bits(found, expected)


@e2e
def test_repeated_orders_are_answered_from_state_that_travels(ray, tmp_path):
    """An order that comes twice is answered from its version, also by a worker that lacks it."""
    made = experiment(ROWS["scaffold"](), settings={"rounds": 2})
    expected, _ = rounds(made, tmp_path / "loop", Loop)

    def start(plan):
        return Faulty(RayEngine(plan, 2, apart=True), repeat=lambda c, o: True)

    found, _ = rounds(made, tmp_path / "ray", start)
    assert same_bits(found, expected)


@e2e
def test_what_is_not_there_at_the_deadline_is_not_waited_for(ray, tmp_path):
    made = experiment(sleepy(str(tmp_path), 600.0))
    plan = made.plan(tmp_path / "ray")
    engine = RayEngine(plan, 2)
    channel = Channel(engine, Wire(plan.start.layout))
    channel.begin(0, stage="init")
    state = made.method.init(channel, made.setup(plan.start))
    channel.begin(0)
    orders = [o for c in range(6) for o in [coterie.Order(c, "train", made.method.sends(state, c))]]
    _, requests = channel.prepare(orders, {})
    began, pids = time.monotonic(), engine.pids
    answers = dict(engine.exchange(requests, time.monotonic() + 3))
    assert time.monotonic() - began < 8
    assert (tmp_path / "began").exists()
    assert [c for c, a in answers.items() if a is None] == [0]
    again = dict(engine.exchange(requests[1:]))  # nothing of the first is left behind
    assert sorted(again) == [1, 2, 3, 4, 5]
    assert {c: again[c].to_bytes() for c in again} == {c: answers[c].to_bytes() for c in again}
    assert len(set(pids) & set(engine.pids)) == 1
    engine.close()


@e2e
def test_a_model_of_45_megabytes_goes_through(ray, tmp_path):
    from coterie.models import make_model

    people = digits(clients=2, samples=60)
    made = experiment(
        coterie.fedper(),
        people,
        model=lambda: make_model("resnet18", people.shape, people.targets),
        settings={"rounds": 1},
    )
    plan = made.plan(tmp_path / "x")
    assert 4 * plan.start.vector.numel() > 44e6
    state, channel, _ = drive(made, tmp_path / "loop")
    expected = models(made, state, channel)
    for apart in (False, True):
        state, channel, engine = drive(
            made, tmp_path / f"ray{apart}", lambda plan: RayEngine(plan, 2, apart=apart)
        )
        assert same_bits(models(made, state, channel), expected)
        engine.close()


@e2e
def test_secure_sums_need_shared_storage(ray, tmp_path):
    from coterie.channel.privacy.settings import Privacy

    made = experiment(coterie.fedavg(), settings={"privacy": Privacy(secure=True)})
    plan = made.plan(tmp_path)
    plan.roster.prepare()
    with pytest.raises(EngineError, match="storage that all machines of the cluster share"):
        RayEngine(plan, 1, apart=True)
    with_loop = execute(made, tmp_path / "loop")
    on_ray = replace(made, settings=replace(made.settings, engine="ray", workers=2))
    result = execute(on_ray, tmp_path / "ray")
    assert result.clients == with_loop.clients


@e2e
def test_what_cannot_come_up_or_has_no_room_is_said(ray, tmp_path, monkeypatch):
    plan = experiment(coterie.fedavg()).plan(tmp_path)
    with pytest.raises(EngineError, match=r"could not be started on the Ray cluster: .*nonsense"):
        RayEngine(replace(plan, bn="nonsense"), 1)
    with pytest.raises(EngineError, match="room for 3 workers of 1 CPUs each, not for 9"):
        RayEngine(plan, 9)
    with pytest.raises(EngineError, match=r"room for 0 workers of 4 CPUs each.*3 CPUs, 0 GPUs"):
        RayEngine(plan, cpus=4)
    engine = RayEngine(plan, cpus=1.5)
    assert len(engine.pids) == 2
    engine.close()
    monkeypatch.setattr(engine_module, "versions", lambda: {"torch": "0.1"})
    with pytest.raises(EngineError, match=r"has coterie .* this one torch 0.1"):
        RayEngine(plan, 1)


# --- without a cluster ---------------------------------------------------------------------------


def test_the_plan_travels_whole_and_each_storage_once(tmp_path):
    made = experiment(ROWS["fedper"]())
    plan = made.plan(tmp_path)
    shared = share(portable(plan), pickle.dumps)
    there = load_plan(shared)
    assert len(shared.arrays) < 5  # all clients' samples, all labels, public ones
    for ours, theirs in zip(plan.population.clients, there.population.clients, strict=True):
        for split in ("train", "val", "test"):
            for side in "xy":
                a, b = (getattr(getattr(c, split), side) for c in (ours, theirs))
                assert torch.equal(a, b)
                assert a.dtype == b.dtype
    assert isinstance(there.population, Population)
    assert there.method.source.make().name == "fedper"
    shared = shared.arrays[0].ctypes.data
    assert any(
        c.train.x.untyped_storage().data_ptr() == shared for c in there.population.clients
    )  # a view, not a copy


def test_a_method_without_a_name_stays_at_home(tmp_path):
    plan = experiment(replace(coterie.fedavg(), source=None)).plan(tmp_path)
    with pytest.raises(EngineError, match=r"not made by a @coterie.method factory"):
        RayEngine(plan, 1)


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_token_that_others_can_read_is_refused(home, monkeypatch):
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    for mode in (0o644, 0o640, 0o604):
        token.chmod(mode)
        with pytest.raises(EngineError, match=f"run `chmod 600 {token}"):
            check_token(None)
    token.chmod(0o600)
    check_token(None)
    check_token("auto")
    assert "RAY_AUTH_TOKEN" not in os.environ
    elsewhere = home / "token"
    elsewhere.write_text("secret")
    elsewhere.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(elsewhere))
    with pytest.raises(EngineError, match=f"run `chmod 600 {elsewhere}"):
        check_token("auto")


def test_without_a_token_a_local_ray_has_one_of_its_own_and_a_cluster_is_refused(home):
    with pytest.raises(EngineError, match="there is no token"):
        check_token("auto")
    check_token(None)
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert not (home / ".ray").exists()


def test_authentication_cannot_be_switched_off(home, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(EngineError, match="RAY_AUTH_MODE = disabled"):
        check_token(None)


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"pip install 'coterie\[ray\]'"):
        RayEngine(experiment(coterie.fedavg()).plan(tmp_path), 1)


def test_settings_of_ray_are_refused_elsewhere():
    for key, value in (("address", "auto"), ("cpus_per_worker", 2.0), ("gpus_per_worker", 0.5)):
        made = experiment(coterie.fedavg(), settings={key: value})
        with pytest.raises(ConfigError, match=f"run.{key} = .* is for Ray"):
            execute(made)


@pytest.mark.parametrize(
    ("device", "gpus", "told"),
    [("cuda", 0.0, "needs a share of a GPU"), ("cpu", 0.5, "has no effect with run.device")],
)
def test_gpus_and_the_device_go_together(device, gpus, told, tmp_path):
    plan = replace(experiment(coterie.fedavg()).plan(tmp_path), device=device)
    with pytest.raises(ConfigError, match=told):
        RayEngine(plan, 1, gpus=gpus)


def test_a_client_of_ray_elsewhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="ray://"):
        RayEngine(experiment(coterie.fedavg()).plan(tmp_path), 1, "ray://there:10001")
