"""Mistakes with keys, serve and join: a sentence, its exit code, and nothing started."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.engines.flower import hub, processes


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch):
    def started(*given, **more):
        raise AssertionError(f"it started {given[:1]}")

    monkeypatch.setattr(processes.subprocess, "Popen", started)
    monkeypatch.setattr(hub, "Child", started)


@pytest.fixture
def config():
    Path("c.toml").write_text("[data]\nclients = 3\n[run]\nrounds = 1\n")
    return "c.toml"


@pytest.fixture
def keys(cli):
    assert cli("keys", "make", "--host", "127.0.0.1", "--client", "a", "--client", "b").code == 0
    return "federation"


# --- keys ----------------------------------------------------------------------------------------


def test_keys_are_made_once_and_added_to(cli, keys):
    made = cli("keys", "make", "--host", "127.0.0.1", "--client", "a")
    made.says(2, "there is a federation in federation already")
    added = cli("keys", "add", "--client", "c")
    assert added.code == 0
    assert "client 2: send federation/clients/c to c" in added.out
    cli("keys", "add", "--client", "a").says(2, "'a' is a client of this federation already")
    cli("keys", "renew", "--host", "0.0.0.0").says(2, "name the one that clients use")
    renewed = cli("keys", "renew", "--host", "192.0.2.7")
    assert renewed.code == 0
    assert "valid until" in renewed.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("add --client x --dir nowhere", "nowhere"),
        ("renew --host h --dir nowhere", "nowhere"),
        ("make --host h --client A/B", "cannot be a client's name"),
        ("make --host h --client a --client a", "given twice"),
        ("make --host h:80 --client a", "is not a valid host"),
        ("make --host h --client a --days 0", "0 days"),
    ],
)
def test_keys_that_cannot_be(cli, words, told):
    cli("keys", *words.split()).says(2, told)


# --- serve ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "federation"),  # no keys were made
        ("--keys nowhere", "nowhere"),
        ("--insecure --host 0.0.0.0", "--insecure is for loopback (127.0.0.1) only"),
        ("--insecure --host 192.0.2.7", "--insecure is for loopback (127.0.0.1) only"),
        (
            "--insecure --host no.such.host.invalid",
            "8443: invalid address",
        ),
        ("--insecure --set clock.name=links", "clock.name = links simulates"),
        ("--insecure --set availability.name=random", "availability.name = random simulates"),
        ("--insecure --set run.holdout=1", "run.holdout is for simulations"),
        ("--insecure --set privacy.secure=true", "privacy.randomness = system"),
        ("--insecure --set method.name=fedagv", "did you mean 'fedavg'"),
        ("--insecure --set model.name=mpl", "did you mean 'mlp'"),
        ("--insecure --set model.name=os:system", "os has no file of source code"),
        ("--insecure --model net=nowhere.py:net", "nowhere.py"),
        ("--insecure --set run.round=3", "did you mean 'run.rounds'"),
    ],
)
def test_what_cannot_be_served(cli, config, words, told):
    cli("serve", config, "--dir", "r", *words.split()).says(2, told)
    assert not Path("r/config.toml").exists()


def test_no_configuration(cli):
    cli("serve", "nowhere.toml", "--dir", "r").says(
        2, "there is no configuration file nowhere.toml"
    )


def test_nobody_to_wait_for(cli, config):
    ended = cli("serve", config, "--dir", "r", "--insecure", "--expect", 0)
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_the_server_s_folder_will_do(cli, config, keys):
    """The keys are read before anything is started."""
    (Path(keys) / "server/server.key").chmod(0o644)
    cli("serve", config, "--dir", "r", "--keys", f"{keys}/server").says(2, "server.key")


def test_served_with_another_configuration(cli, config):
    place = Path("r/flower")
    place.mkdir(parents=True)
    (place / "served.json").write_text('{"config": {"run": {"rounds": 9}}, "run": "ab"}')
    cli("serve", config, "--dir", "r", "--insecure").says(2, "r serves another configuration")
    (place / "served.json").write_text('{"config": ')
    cli("serve", config, "--dir", "r", "--insecure").says(4, "served.json is damaged")


# --- join ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("--server localhost", 2, "--server localhost: write HOST:PORT, as in localhost:8443"),
        ("--server localhost:http", 2, "write HOST:PORT"),
        ("--server localhost:", 2, "write HOST:PORT"),
        ("--server :8443", 2, "write HOST:PORT"),
        ("--server localhost:99999", 2, "write HOST:PORT"),
        (
            "--server localhost:1 --client 0",
            2,
            "--client is the client's number where there are no keys",
        ),
        (
            "--server localhost:1 --insecure",
            2,
            "--client is the client's number where there are no keys",
        ),
        ("--server 192.0.2.7:1 --insecure --client 0", 2, "--insecure is for loopback only"),
        ("--server 127.0.0.1.example.org:1 --insecure --client 0", 2, "for loopback only"),
        ("--server localhost:1", 2, "d/keys"),
        ("--server localhost:1 --keys nowhere", 2, "nowhere"),
        ("--server localhost:1 --device abacus", 2, "abacus"),
        ("--server localhost:1 --model mynet", 2, "write NAME=FILE.py:FUNCTION"),
        ("--server localhost:1 --model mlp=mine.py:net", 2, "'mlp' is built in"),
        ("--server localhost:1 --model net=nowhere.py:net", 2, "nowhere.py"),
    ],
)
def test_what_cannot_join(cli, words, code, told):
    cli("join", "--dir", "d", "--simulated", *words.split()).says(code, told)
    assert not Path("d").exists()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("", 2, "give this client's data with --data PATH"),
        ("--data nowhere.npz", 3, "there is no file or folder"),
        ("--data-loader nowhere", 2, "write package.module:function"),
        ("--data-loader nowhere:load", 2, "No module named 'nowhere'"),
        ("--simulated --form csv", 2, "--simulated uses the experiment's own data"),
        ("--simulated --option label", 2, "--option label: write key=value"),
    ],
)
def test_data_that_cannot_be(cli, words, code, told):
    where = ("--server", "localhost:1", "--insecure", "--client", 0)
    cli("join", "--dir", "d", *where, *words.split()).says(code, told)


def test_keys_of_another_client_s_folder(cli, keys):
    mine = Path(keys) / "clients/a"
    (mine / "identity.key").write_bytes((Path(keys) / "clients/b/identity.key").read_bytes())
    words = ("--server", "localhost:1", "--dir", "d", "--keys", mine, "--simulated")
    cli("join", *words).says(2, "identity.key is not the one")


def test_an_option_is_read_as_in_a_configuration():
    from coterie.cli.federation import _option

    assert _option("label=kind") == ("label", "kind")
    assert _option("header=3") == ("header", 3)
    assert _option("columns=['a']") == ("columns", ["a"])
