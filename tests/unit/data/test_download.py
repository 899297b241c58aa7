"""Downloads, from a server of the test's own."""

from __future__ import annotations

import hashlib
import http.server
import socket
import threading
from functools import partial

import pytest

from coterie.data import load, sources
from coterie.errors import DataError


class _Server(http.server.ThreadingHTTPServer):
    requests: list[str]


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        self.server.requests.append(self.path)


@pytest.fixture
def served(tmp_path, write_mnist, monkeypatch):
    """A server with a tiny MNIST whose checksums are the ones in the table."""
    folder = tmp_path / "served"
    write_mnist(folder)
    files = {
        path.name: "md5:" + hashlib.md5(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }
    server = _Server(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
    server.requests = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setitem(
        sources.SOURCES, "mnist", sources.DownloadSource("http://127.0.0.1:9/", files)
    )
    yield address, server, folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_download_once_then_use_the_cache(served, tmp_path, capfd):
    address, server, _ = served
    raw = load("mnist", mirror=address)
    assert raw.x.shape == (12, 1, 5, 4)
    assert len(server.requests) == 4
    kept = tmp_path / "cache" / "mnist"
    assert len(list(kept.iterdir())) == 4
    load("mnist", mirror=address)
    assert len(server.requests) == 4
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_cache_parameter_and_damaged_cache(served, tmp_path):
    address, server, _ = served
    load("mnist", mirror=address, cache=tmp_path / "mine")
    damaged = tmp_path / "mine" / "mnist" / "train-labels-idx1-ubyte.gz"
    good = damaged.read_bytes()
    damaged.write_bytes(b"damaged")
    load("mnist", mirror=address, cache=str(tmp_path / "mine"))
    assert damaged.read_bytes() == good
    assert len(server.requests) == 5


def test_the_folder_comes_first(served, tmp_path, write_mnist):
    _, server, _ = served
    write_mnist(tmp_path / "data" / "mnist")
    load("mnist", tmp_path / "data")
    assert server.requests == []


def test_wrong_checksum(served, tmp_path):
    address, _, folder = served
    path = folder / "train-images-idx3-ubyte.gz"
    expected = hashlib.md5(path.read_bytes()).hexdigest()
    path.write_bytes(b"something else")
    got = hashlib.md5(b"something else").hexdigest()
    with pytest.raises(DataError) as caught:
        load("mnist", mirror=address)
    message = str(caught.value)
    assert "train-images-idx3-ubyte.gz" in message
    assert expected in message
    assert got in message
    assert "deleted" in message
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_missing_on_the_server(served):
    address, _, folder = served
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"cannot download .*/t10k-labels-idx1-ubyte.gz .*404"):
        load("mnist", mirror=address)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_no_network_names_files_and_folder(served, tmp_path):
    mirror = f"http://127.0.0.1:{closed_port()}"
    (tmp_path / "data").mkdir()
    places = ((tmp_path / "data", tmp_path / "data"), (None, tmp_path / "cache"))
    for folder, by_hand in places:
        with pytest.raises(DataError) as caught:
            load("mnist", folder, mirror=mirror)
        message = str(caught.value)
        for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3"):
            assert f"{part}-ubyte.gz" in message
        assert message.endswith(f" into {by_hand / 'mnist'}")


def test_an_address_that_is_none(served):
    with pytest.raises(DataError, match="cannot download nonsense/"):
        load("mnist", mirror="nonsense")


def test_the_table_of_sources_is_well_formed():
    for source in sources.SOURCES.values():
        assert source.base.startswith("http")
        assert source.base.endswith("/")
        for checksum in source.files.values():
            algorithm, digest = checksum.split(":")
            assert len(digest) == 2 * hashlib.new(algorithm).digest_size
            assert int(digest, 16)
