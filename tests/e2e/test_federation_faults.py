"""What goes wrong in a real federation, for real: over TLS with node keys, against the loop."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import faulty
from coterie.experiment.export import reopen
from federated import (
    CONFIG,
    Federation,
    Process,
    events,
    free_port,
    named,
    rounds,
    same_models,
    until,
)
from processes import COTERIE

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# What a client's worker imports before anything else: it does wrong what files tell it to. Work is
# held when it is done and on disk, but not yet answered: the worst moment.
FAULTS = """
import os, sys, time
from dataclasses import replace
from pathlib import Path

if "coterie.deploy.worker" in sys.orig_argv:
    from coterie.channel.tasks import kind_of
    from coterie.client.client import Client
    from coterie.client.runtime import ClientRuntime
    from coterie.channel.compression.coding import Coded
    from coterie.core.weights import Weights

    place = Path(os.environ["FAULTS"])
    carry_out, reply, fit = ClientRuntime._carry_out, ClientRuntime.reply, Client.fit

    def slowly(self, asked):
        body = asked.body
        self.now = body["round"] + 1
        answer = carry_out(self, asked)
        hold = place / f"hold-{body['round'] + 1}"
        if kind_of(body["task"]).trains and hold.exists():
            (place / f"held-{body['round'] + 1}").touch()
            while hold.exists():
                time.sleep(0.05)
        return answer

    def wrongly(self, examples, upload, version="", coded=None, more=None):
        path = place / f"send-{self.now}"
        kind = path.read_text() if path.exists() else ""
        if "model" not in upload.arrays or not kind:
            return reply(self, examples, upload, version, coded, more)
        model = upload.arrays["model"]
        if kind == "nan":
            coded = Coded({"model": Weights(model.layout, model.vector * float("nan"))})
        elif kind == "cut":
            coded = Coded({"model": model.vector[:-1].clone()})
        elif kind == "layers":
            coded = Coded({"model": model.only(model.layout.names[:2])})
        elif kind == "many":
            examples = 10**9
        return reply(self, examples, upload, version, coded, more)

    def diverging(self, *given, **named):
        found = fit(self, *given, **named)
        path = place / f"send-{self.round + 1}"
        if not path.exists() or path.read_text() != "diverge":
            return found
        model = found.weights
        return replace(found, weights=Weights(model.layout, model.vector * float("nan")))

    ClientRuntime._carry_out, ClientRuntime.reply, Client.fit = slowly, wrongly, diverging
"""


class Wards(Federation):
    """A federation whose clients do wrong what they are told to."""

    def __init__(self, root: Path, **settings) -> None:
        super().__init__(root, **settings)
        self.root.joinpath("sitecustomize.py").write_text(FAULTS)
        self.households: dict[str, Process] = {}

    def faults(self, name: str) -> Path:
        place = self.root / "faults" / name
        place.mkdir(parents=True, exist_ok=True)
        return place

    def join(self, name, *more, keys=None, folder=""):
        found = os.environ.get("PYTHONPATH", "")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAULTS", str(self.faults(name)))
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(self.root), found))))
            self.households[name] = super().join(name, *more, keys=keys, folder=folder)
        return self.households[name]

    def close(self) -> None:
        for process in self.running:  # all at once, then each
            if process.process.poll() is None:
                process.process.send_signal(signal.SIGTERM)
        super().close()

    def stranger(self, name: str, keys: Path | None, *more) -> Process:
        """Somebody who would like to join."""
        words = ["join", "--server", f"127.0.0.1:{self.port}", "--dir", self.root / name]
        trust = [] if keys is None else ["--keys", keys]
        process = Process([*words, "--simulated", *trust, *more], self.root / f"{name}.log")
        self.running.append(process)
        return process

    def plain(self, name: str, *trust) -> Process:
        """A SuperNode as Flower has it, without a key."""
        quiet = ["FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1"]
        command = ["env", *quiet, f"FLWR_HOME={self.root / name}"]
        node = Path(sys.executable).with_name("flower-supernode")
        where = ["--superlink", f"127.0.0.1:{self.port}", "--port", free_port()]
        words = [*where, "--isolation", "process", *trust]
        process = Process(words, self.root / f"{name}.log", [*command, str(node)])
        self.running.append(process)
        return process

    def hold(self, name: str, round: int) -> Callable[[], None]:
        """Let a client stop when it has done its work of this round; gives what lets it go on."""
        path = self.faults(name) / f"hold-{round}"
        self.faults(name).joinpath(f"held-{round}").unlink(missing_ok=True)
        path.touch()
        return lambda: path.unlink(missing_ok=True)

    def held(self, name: str, round: int) -> None:
        path = self.faults(name) / f"held-{round}"
        until(path.exists, f"{name} at work in round {round}", 300)

    def everybody(self, *names: str) -> None:
        """Whoever of these (or of all) is not there joins; who is not among them leaves."""
        wanted = names or self.names
        for name in self.names:
            there = name in self.households and self.households[name].process.poll() is None
            if name in wanted and not there:
                self.join(name)
            elif there and name not in wanted:
                self.households[name].end()
        for path in self.root.glob("faults/*/*"):
            path.unlink()

    def connected(self, name: str) -> None:
        """Wait until the server has let this client's SuperNode in."""
        log, alive = self.root / name / "flower" / "supernode.log", self.households[name].process

        def said() -> bool:
            there = named(alive.pid, "flower-supernode")
            return bool(there) and log.exists() and "SuperNode ID" in log.read_text()

        until(said, f"{name} connected:\n{log}", 180)

    def part(self, name: str, words: str) -> int:
        """The one process of a household whose command has these words."""
        (pid,) = named(self.households[name].process.pid, words)
        return pid

    def losing(self, name: str, lost: Collection[tuple[str, int]], *more: str) -> Path:
        """The same experiment in one process, but that clients' work of some rounds is lost."""
        missing = [[self.names.index(who), str(round)] for who, round in sorted(lost)]
        script = (
            "import sys\n"
            f"sys.path.insert(0, {str(Path(faulty.__file__).parent)!r})\n"
            "from faulty import Faulty\n"
            "from coterie.engines.loop import Loop\n"
            "from coterie.experiment import experiment\n"
            f"lost = {missing!r}\n"
            "def gone(client, order): return [client, order.partition('.')[0]] in lost\n"
            "experiment.ENGINES['loop'] = lambda plan, _: Faulty(Loop(plan), lose_reply=gone)\n"
            "from coterie.cli.app import main\n"
            "main()\n"
        )
        place = self.root / f"{name}-loop"
        command = ["run", self.config, "--engine", "loop", "--dir", place, "--quiet", *more]
        ended = subprocess.run(
            [sys.executable, "-c", script, *map(str, command)], capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        return place


def absent(fed: Federation, run: str) -> set[tuple[str, int]]:
    """Who had no part in which rounds."""
    return {
        (name, e["round"])
        for e in rounds(fed.root / run)
        for client, name in enumerate(fed.names)
        if str(client) not in e["client_bytes"]
    }


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    """Four clients that stay while one federation after another is served."""
    made = Wards(tmp_path_factory.mktemp("faults"), names=("a", "b", "c", "d"))
    try:
        yield made
    finally:
        made.close()


def asked(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


DITTO = ("method.name=ditto",)
SCAFFOLD = ("method.name=scaffold",)


def test_wrong_answers_are_rejected_by_name(fed):
    fed.everybody()
    faults = {"nan": 2, "cut": 3, "layers": 4, "many": 5, "diverge": 6}
    for kind, round in faults.items():
        fed.faults("b").joinpath(f"send-{round}").write_text(kind)
    more = asked(*DITTO, "run.rounds=7")
    server = fed.serve("wrong", *more)
    loop = fed.losing("wrong", {("b", round) for round in faults.values()}, *more)
    assert server.wait(500) == 0, server.text
    told = {e["round"]: e.get("rejected", {}) for e in rounds(fed.root / "wrong")}
    assert told.keys() == set(range(1, 8))
    words = {
        "nan": "no longer finite",
        "diverge": "no longer finite",
        "cut": "differ in form from those of the others",
        "layers": "differ in form from those of the others",
        "many": "counts 1000000000 samples",
    }
    for kind, round in faults.items():
        assert list(told[round]) == ["1"], (kind, told)
        assert words[kind] in told[round]["1"], (kind, told)
    assert not told[1]
    assert not told[7]
    same_models(fed, loop)
    for name in fed.names:
        model = load_file(fed.root / name / "model.safetensors")
        assert all(torch.isfinite(t).all() for t in model.values())


def test_a_superlink_that_is_killed_is_brought_back(fed):
    fed.everybody()
    more = asked(*SCAFFOLD, "run.rounds=3")
    release = fed.hold("a", 2)
    server = fed.serve("link", *more)
    loop = fed.loop("link", *more)
    fed.held("a", 2)
    (link,) = named(server.process.pid, "flower-superlink")
    os.kill(link, signal.SIGKILL)
    server.says("the SuperLink was restarted")
    release()
    assert server.wait(500) == 0, server.text
    same_models(fed, loop)
    assert not absent(fed, "link")


def test_a_server_that_is_killed_goes_on_to_the_same_bits(fed):
    fed.everybody()
    more = asked(*SCAFFOLD, "run.rounds=3")
    release = fed.hold("a", 2)
    server = fed.serve("killed", *more)
    fed.held("a", 2)
    (link,) = named(server.process.pid, "flower-superlink")
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait()
    until(lambda: not Path(f"/proc/{link}").exists(), "the end of the SuperLink")
    release()
    assert [e["round"] for e in rounds(fed.root / "killed")] == [1]
    loop = fed.loop("killed", *more)
    again = fed.serve("killed", *more)
    assert again.wait(500) == 0, again.text
    assert "going on" in again.text
    same_models(fed, loop)
    assert [e["round"] for e in rounds(fed.root / "killed")] == [1, 2, 3]
    assert not absent(fed, "killed")


def test_a_late_answer_holds_up_nothing_after_it(fed):
    """One is at work for two rounds; what it was asked meanwhile has expired when it is back."""
    fed.everybody()
    more = asked(*DITTO, "run.rounds=5", "run.real_deadline=15")
    release = fed.hold("b", 2)
    fed.hold("b", 3)  # nobody lets it go on, should it work at that
    server = fed.serve("stale", *more)
    fed.held("b", 2)
    until(lambda: len(rounds(fed.root / "stale")) == 3, "the end of round 3", 300)
    release()
    assert server.wait(500) == 0, server.text
    gone = absent(fed, "stale")  # on a busy machine others may be late too, now and then
    assert {round for name, round in gone if name == "b"} in ({2, 3}, {2, 3, 4})
    for event in rounds(fed.root / "stale"):
        assert event["lost"] + event["late"] == sum(e == event["round"] for _, e in gone)
        assert event["seconds"]["train"] < 15 + 5
    loop = fed.losing("stale", gone, *more)
    same_models(fed, loop)


def test_a_client_that_leaves_holds_nobody_up(fed):
    fed.everybody()
    more = asked(*DITTO, "run.rounds=4", "run.cohort=4")  # more than there will be
    release = fed.hold("d", 2)
    server = fed.serve("leaves", *more)
    fed.held("d", 2)
    fed.households["d"].end()
    release()
    loop = fed.losing("leaves", {("d", 2), ("d", 3), ("d", 4)}, *more)
    assert server.wait(500) == 0, server.text
    assert absent(fed, "leaves") == {("d", 2), ("d", 3), ("d", 4)}
    seconds = [e["seconds"]["train"] for e in rounds(fed.root / "leaves")]
    assert max(seconds[2:]) < seconds[0] + 10, seconds
    same_models(fed, loop, ["a", "b", "c"])


def test_killed_parts_of_clients_come_back(fed):
    """A whole household, a worker, a SuperNode: the round goes on without, and they come back."""
    fed.everybody()
    more = asked("method.name=ifca+ditto", "method.k=2", "run.rounds=4")
    hit = ("b", "c", "d")
    releases = [fed.hold(name, 2) for name in hit]
    wait = fed.hold("a", 3)
    server = fed.serve("kills", *more)
    for name in hit:
        fed.held(name, 2)
    node = fed.part("d", "flower-supernode")
    worker = fed.part("c", "coterie.deploy.worker")
    stays = fed.part("d", "coterie.deploy.worker")
    fed.households["b"].kill()
    os.kill(worker, signal.SIGKILL)
    os.kill(node, signal.SIGKILL)
    for release in releases:
        release()
    fed.join("b")
    fed.held("a", 3)
    for name in hit:
        fed.connected(name)
    wait()
    assert server.wait(500) == 0, server.text
    gone = absent(fed, "kills")
    assert gone >= {(name, 2) for name in hit}
    assert gone <= {(name, round) for name in hit for round in (2, 3)}
    assert rounds(fed.root / "kills")[1]["lost"] == 3
    loop = fed.losing("kills", gone, *more)
    same_models(fed, loop)
    served, alone = (rounds(place)[-1]["groups"] for place in (fed.root / "kills", loop))
    assert served == alone
    assert fed.part("c", "coterie.deploy.worker") != worker
    assert fed.part("d", "flower-supernode") != node
    assert fed.part("d", "coterie.deploy.worker") == stays


def test_strangers_are_refused_and_told_why(fed, tmp_path):
    """A key that is not registered, none, no TLS, another federation's: while a run goes on."""
    fed.everybody()
    other = Federation(tmp_path, names=("a",))
    own, theirs = fed.keys / "clients" / "a", other.keys / "clients" / "a"
    mixed = tmp_path / "mixed"
    shutil.copytree(theirs, mixed)
    shutil.copy(own / "ca.pem", mixed / "ca.pem")
    more = asked(*SCAFFOLD, "run.rounds=3")
    release = fed.hold("a", 2)
    server = fed.serve("strangers", *more)
    fed.held("a", 2)
    strangers = {
        "unregistered": fed.stranger("unregistered", mixed),
        "another": fed.stranger("another", theirs),
        "no-tls": fed.stranger("no-tls", None, "--insecure", "--client", 1),
        "no-key": fed.plain("no-key", "--root-certificates", own / "ca.pem"),
        "plain": fed.plain("plain", "--insecure"),
    }
    try:
        strangers["unregistered"].says("its key is not registered there")
        strangers["another"].says("its certificate does not match ca.pem")
        strangers["no-tls"].says("requires TLS and keys: leave out --insecure")
        assert strangers["no-key"].wait() != 0
        strangers["plain"].says("Connection attempt failed")
        ca = (own / "ca.pem").read_bytes()
        _try_control(fed.port, ca)
        release()
        loop = fed.loop("strangers", *more)
        assert server.wait(500) == 0, server.text
    finally:
        for process in strangers.values():
            process.end()
    same_models(fed, loop)
    for event in rounds(fed.root / "strangers"):
        assert sorted(event["client_bytes"]) == ["0", "1", "2", "3"]
        assert "rejected" not in event


def _try_control(port: int, ca: bytes) -> None:
    """What Flower leaves open to whoever reaches its port is not to be had at ours."""
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        server_address=f"127.0.0.1:{port}",
        insecure=False,
        root_certificates=ca,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-cli")],
    )
    for call, request in (
        (client.StartRun, StartRunRequest()),
        (client.RegisterNode, RegisterNodeRequest(public_key=b"mine")),
    ):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            call(request)
        assert refused.value.response.status_code == 404


def test_without_keys_on_loopback_only(tmp_path, cli):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(clients=2, rounds=1, samples=200))
    port, place = free_port(), tmp_path / "served"
    served = ["serve", config, "--dir", place, "--insecure", "--port", port]
    processes = [Process(served, tmp_path / "served.log")]
    for client in (1, 0):
        words = ["join", "--server", f"127.0.0.1:{port}", "--dir", tmp_path / f"client{client}"]
        words += ["--insecure", "--client", client, "--simulated", "--once"]
        processes.append(Process(words, tmp_path / f"client{client}.log"))
    try:
        assert [process.wait(500) for process in processes] == [0, 0, 0], processes[0].text
    finally:
        for process in processes:
            process.end()
    assert "no encryption and no authentication" in processes[0].text
    cli("run", config, "--engine", "loop", "--dir", "loop", "--quiet")
    result = reopen(Path("loop"))
    for client in (0, 1):
        found = load_file(tmp_path / f"client{client}" / "model.safetensors")
        for name, tensor in result.weights(client).tensors().items():
            assert torch.equal(found[name], tensor)
    cli("serve", config, "--dir", "open", "--insecure", "--host", "0.0.0.0").says(
        2, "--insecure is for loopback"
    )
    cli(
        "join",
        "--server",
        "192.0.2.1:8443",
        "--dir",
        "me",
        "--insecure",
        "--client",
        0,
        "--simulated",
    ).says(2, "--insecure is for loopback only", "192.0.2.1:8443")


def test_whoever_comes_late_is_admitted(fed):
    """One that has keys and was not there; and one whose keys are made while it goes on.

    It comes last: from here on the federation has one more client.
    """
    fed.everybody("a", "b", "c")
    more = asked(*DITTO, "run.rounds=5", "data.clients=5")
    holds = {round: fed.hold("a", round) for round in (1, 2, 3)}
    server = fed.serve("late", *more, "--expect", 3)
    fed.held("a", 1)
    fed.join("d")
    fed.connected("d")
    holds[1]()
    fed.held("a", 2)
    command = ["keys", "add", "--client", "e", "--dir", fed.keys]
    subprocess.run([*COTERIE, *map(str, command)], check=True, capture_output=True)
    try:
        fed.join("e")
        holds[2]()  # before the next round the server looks for new keys
        fed.held("a", 3)
        fed.connected("e")
        holds[3]()
        assert server.wait(500) == 0, server.text
    finally:
        fed.households.pop("e").end()
    arrivals = [e for e in events(fed.root / "late") if e.get("event") == "arrival"]
    assert [(e["round"], e["clients"]) for e in arrivals] == [(2, [3]), (4, [4])]
    took_part = [sorted(map(int, e["client_bytes"])) for e in rounds(fed.root / "late")]
    assert took_part == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    for name in (*fed.names, "e"):
        assert (fed.root / name / "model.safetensors").exists()
        assert json.loads((fed.root / name / "model.json").read_text())["rounds"] == 5
