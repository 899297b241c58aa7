"""A server that waits for clients can be asked to stop, by the file that runs are stopped by."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from coterie.deploy import serve
from coterie.errors import Interrupted
from coterie.results.rundir import RunDir


def test_a_file_ends_the_waiting_once(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(serve, "time", SimpleNamespace(sleep=waited.append))
    engine = SimpleNamespace(directory=tmp_path)
    serve.Served.pause(engine)
    assert waited == [serve._POLL]
    RunDir(tmp_path).ask_to_stop()
    with pytest.raises(Interrupted, match="waiting for clients"):
        serve.Served.pause(engine)
    serve.Served.pause(engine)  # what was asked has been heeded
    assert waited == 2 * [serve._POLL]
