"""A real federation on the live page: it waits, is stopped, and resumed."""

import pytest

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")
pytest.importorskip("uvicorn", reason="the live page needs the extra 'live'")

from coterie.report.reading import FINISHED, read_run
from coterie.results.rundir import ENGINE, RunDir
from federated import federation, rounds, same_models, until
from watched import served

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
ROUNDS = 5


def test_a_federation_waits_is_stopped_and_resumed(tmp_path):
    place = tmp_path / "runs" / "served"
    place.parent.mkdir()
    with federation(tmp_path, names=("a", "b"), rounds=ROUNDS) as fed, served(place.parent) as page:

        def says(words):
            until(lambda: words in page.get("/run/served").text, f"the page says {words!r}")

        server = fed.serve("runs/served")
        says("Waiting for clients.")
        assert page.post("/api/runs/served/stop").status == 204
        assert server.wait(60) == 130, server.text
        assert not RunDir(place).config.exists()
        until(lambda: "served" not in page.get("/").text, "what never began is not listed")

        server = fed.serve("runs/served")
        clients = [fed.join(name) for name in fed.names]
        loop = fed.loop("served")
        until(lambda: rounds(place), "a round")
        assert page.post("/api/runs/served/stop").status == 204
        assert server.wait(60) == 130, server.text
        done = len(rounds(place))
        assert 0 < done < ROUNDS

        says(f"Stopped from this page, round {done} of {ROUNDS}")
        assert page.post("/api/runs/served/resume").status == 204
        until(lambda: read_run(place).status == FINISHED, "a result")
        until(lambda: not RunDir(place / ENGINE).at_work(), "the end of what was resumed")
        assert [e["round"] for e in rounds(place)] == list(range(1, ROUNDS + 1))
        assert all(client.process.poll() is None for client in clients)  # they stay
        same_models(fed, loop)
