"""The live page: what it sends, to whom, and what it makes of folders as they are."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from coterie.cli import watch as commands
from coterie.errors import ConfigError, RunDirError
from coterie.report.live import control, folders, watching
from coterie.report.live.control import Controls
from coterie.report.live.folders import Following
from coterie.report.live.rows import row_id, state
from coterie.report.page import Block
from coterie.report.reading import read_run
from coterie.report.repeating import command
from coterie.results.rundir import RunDir
from federated import until
from watched import TOKEN, add_lines, make_run, round_of, served

QUIET = 0.8  # seconds in which somebody has looked more than once, at this pace:


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(watching, "PACE", 0.2)
    monkeypatch.setattr(folders, "_FIND", 0.3)


def plain(reading):
    """A run drawn in no time: how many rounds it has, and something that never changes."""
    return [Block("rounds", f'<p id="rounds">{len(reading.rounds)}</p>'), Block("same", "<p></p>")]


def since(page, path):
    """The version that a page was made with."""
    about = re.search(r'id="live">(.*?)</script>', page.get(path).text)
    return json.loads(unescape(about[1]))["since"]


def words(found):
    return found["parts"].get("state", {"state": {"words": ""}})["state"]["words"]


# --- what is sent -----------------------------------------------------------------------------


def test_rounds_come_as_they_end(tmp_path):
    run = make_run(tmp_path / "a", 3)
    with served(tmp_path, draw=plain) as page:
        told = since(page, "/run/a")
        with page.stream(f"/api/runs/a/events?since={told}") as stream:
            assert stream.maybe(QUIET) is None  # the page has all that there is
            add_lines(run, round_of(4))
            found = stream.next()
            assert "round 4 of 10" in words(found)
            assert found["order"] == ["state", "rounds", "same"]
            assert list(found["parts"]) == ["state", "rounds"]  # which alone have changed
            first = stream.id

            half = json.dumps(round_of(5))
            with (run / "events.jsonl").open("a") as file:
                file.write(half[:200])
            assert stream.maybe(QUIET) is None
            with (run / "events.jsonl").open("a") as file:
                file.write(half[200:] + "\n")
            assert "round 5 of 10" in words(stream.next())

            RunDir(run).rewind(2)  # as a run that is resumed does, with a file of its own
            assert "round 2 of 10" in words(stream.next())
            last = stream.id
        assert first != last
        with page.stream("/api/runs/a/events?since=", Last_Event_ID=first) as stream:
            assert "round 2 of 10" in words(stream.next())
        with page.stream("/api/runs/a/events", Last_Event_ID=last) as stream:
            assert stream.maybe(QUIET) is None
        for unknown in ("another.9999", f"{last.partition('.')[0]}.{'9' * 5000}"):
            with page.stream(f"/api/runs/a/events?since={unknown}") as stream:
                found = stream.next()  # of a server that is no more: all is sent
                assert set(found["parts"]) == set(found["order"])


def test_a_page_that_was_out_of_sight_for_long_gets_all_that_it_missed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", 1)
    with served(tmp_path, draw=plain) as page:
        told = since(page, "/run/a")
        with page.stream(f"/api/runs/a/events?since={told}") as stream:
            for number in (2, 3):
                add_lines(run, round_of(number))
                assert f"round {number} of" in words(stream.next())
            told = stream.id
        monkeypatch.setattr(watching, "_LASTS", 0.0)
        until(lambda: not page.watching._pages, "it is forgotten")
        monkeypatch.setattr(watching, "_LASTS", 60.0)
        add_lines(run, round_of(4))
        with page.stream("/api/runs/a/events?since=x", Last_Event_ID=told) as stream:
            found = stream.next()
            assert "round 4 of 10" in words(found)
            assert found["parts"]["rounds"] == {"html": '<p id="rounds">4</p>'}


def test_while_pictures_are_behind_the_state_says_so(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", 3)
    with served(tmp_path, draw=plain) as page:
        told = since(page, "/run/a")
        assert "What follows" not in page.get("/run/a").text
        monkeypatch.setattr(watching, "_SHARE", 1e9)  # as if drawing took long
        monkeypatch.setattr(watching, "_LONGEST", 2.0)
        with page.stream(f"/api/runs/a/events?since={told}") as stream:
            add_lines(run, round_of(4))
            assert words(stream.next()).startswith("Stopped, or crashed, round 4 of 10")
            add_lines(run, round_of(5))
            found = stream.next()
            assert list(found["parts"]) == ["state"]
            assert words(found).startswith("Stopped, or crashed, round 5 of 10")
            assert words(found).endswith(" %. The page below shows round 4.")
            found = stream.next()  # both at once
            assert list(found["parts"]) == ["state", "rounds"]
            assert "What follows" not in words(found)


def test_what_is_read_again_is_never_ahead_of_what_is_said(tmp_path):
    """A reading that was given up is made anew, of files that have changed since the last look."""
    run = make_run(tmp_path / "a", 2)
    watched = Following(tmp_path)
    assert watched.look()["a"].round == 2
    watched._seen["a"].reading = None
    changes = watched.changes("a")
    assert len(watched.reading("a").rounds) == 2
    assert watched.changes("a") == changes
    watched._seen["a"].reading = None
    add_lines(run, round_of(3))
    assert len(watched.reading("a").rounds) == watched.glance("a").round == 3
    assert watched.changes("a") > changes


def test_what_a_round_does_not_change_is_not_sent(tmp_path):
    """With the blocks that runs really have."""
    run = make_run(tmp_path / "a", 3)
    with (
        served(tmp_path) as page,
        page.stream(f"/api/runs/a/events?since={since(page, '/run/a')}") as stream,
    ):
        add_lines(run, round_of(4))
        sent = set()
        stream.until(lambda found: (sent.update(found["parts"]), "tiles" in sent)[1])
    assert {"state", "tiles", "fig-accuracy"} <= sent
    assert "repeat" not in sent


def test_a_run_is_drawn_once_for_all_who_look_at_it(tmp_path):
    run, drawn = make_run(tmp_path / "a", 1), []

    def draw(reading):
        drawn.append(len(reading.rounds))
        return plain(reading)

    with served(tmp_path, draw=draw) as page:
        told = since(page, "/run/a")
        address = f"/api/runs/a/events?since={told}"
        with page.stream(address) as one, page.stream(address) as two, page.stream(address) as more:
            add_lines(run, round_of(2))
            for stream in (one, two, more):
                found = stream.next()
                assert found["parts"]["rounds"] == {"html": '<p id="rounds">2</p>'}
                assert "same" not in found["parts"]
    assert drawn == [1, 2]


def test_a_page_is_told_of_a_busy_run_once_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "PACE", 1.0)
    monkeypatch.setattr(folders, "_FIND", 1000.0)  # runs that are known need not be found again
    run = make_run(tmp_path / "a", 1, planned=1000)
    with (
        served(tmp_path, draw=plain) as page,
        page.stream(f"/api/runs/a/events?since={since(page, '/run/a')}") as stream,
    ):
        came, number, ends = [], 1, time.monotonic() + 2.5
        while time.monotonic() < ends:
            number += 1
            add_lines(run, round_of(number))
            if (found := stream.maybe(0.05)) is not None:
                came.append(found)
        last = stream.until(lambda found: f"round {number} of" in words(found))
    assert number > 20
    assert 1 <= len(came) <= 3
    assert last["parts"]["rounds"] == {"html": f'<p id="rounds">{number}</p>'}


def test_the_list_shows_runs_that_come_and_go(tmp_path):
    make_run(tmp_path / "old", 2)
    with served(tmp_path) as page:
        told = since(page, "/")
        with page.stream(f"/api/events?since={told}") as stream:
            make_run(tmp_path / "sweep" / "new", 1)
            found = stream.next()
            assert found["order"] == ["summary", row_id("old"), row_id("sweep/new")]
            assert list(found["parts"]) == ["summary", row_id("sweep/new")]  # and not the old one
            assert found["parts"]["summary"] == {"text": "2 runs, none running."}
            assert 'href="/run/sweep/new"' in found["parts"][row_id("sweep/new")]["html"]
            shutil.rmtree(tmp_path / "old")
            found = stream.next()
            assert found["order"] == ["summary", row_id("sweep/new")]
        assert page.get("/run/old").status == 404


def test_runs_of_a_comparison_are_folded_under_it_and_compared(tmp_path):
    for name, rounds in (("sweep/a/seed-0", 3), ("sweep/b/seed-0", 2), ("other", 1)):
        make_run(tmp_path / name, rounds)
    (tmp_path / "sweep" / "comparison.toml").write_text("format = 2\n")
    head = row_id("sweep", "comparison")
    with served(tmp_path) as page:
        text = page.get("/").text
        ids = re.findall(r'<tr id="([^"]+)"', text)
        members = {row_id("sweep/a/seed-0"), row_id("sweep/b/seed-0")}
        place = ids.index(head)
        assert set(ids[place + 1 : place + 3]) == members  # just below it
        assert text.count(f'data-group="{head}"') == 2
        assert "2 runs" in text
        whole = page.get("/compare?comparison=sweep")
        chosen = page.get("/compare?run=sweep%2Fa%2Fseed-0&run=other&run=nobody")
        assert whole.status == chosen.status == 200
        assert "2 runs side by side" in chosen.text
        assert 'href="/run/other"' in chosen.text  # to its page, not to a part of this one
        assert "/report.html?comparison=sweep" in whole.text
        kept = page.get("/report.html?comparison=sweep")
        assert kept.headers["content-disposition"] == 'attachment; filename="report.html"'
        assert 'content="coterie report ' in kept.text
        assert page.get("/compare?run=other").status == 404
        assert page.get("/report.html?run=nobody").status == 404


def test_a_row_has_the_data_the_curve_and_the_time_that_is_left(tmp_path):
    place = make_run(tmp_path / "a", 4)
    reading = read_run(place)
    left = folders._left(reading)
    assert left is None  # nobody works on it
    running = replace(reading, status="running")
    spent = sum(sum(e["seconds"].values()) for e in running.rounds) / 4
    assert folders._left(running) == pytest.approx(spent * (running.planned - 4))
    assert len(folders._curve(reading)) == 4


def test_stopped_from_here_is_not_crashed(tmp_path):
    controls = Controls()
    place = make_run(tmp_path / "a", 2)
    following = Following(tmp_path, controls.doing)
    assert following.look()["a"].status == "stopped"
    running = replace(following.look()["a"], status="running")
    controls.stop(running)
    assert following.look(search=True)["a"].status == "asked"
    assert state(following.look()["a"])["words"].startswith("Stopped from this page, round 2")
    assert state(following.look()["a"])["action"] == "resume"
    assert RunDir(place).stop_pending()


def test_finished_runs_are_not_read_again(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", 2)
    (run / "result.json").write_text('{"method": "fedavg"}')
    make_run(tmp_path / "b", 2)
    read = []
    monkeypatch.setattr(folders, "read_run", lambda p, n: (read.append(n), read_run(p, n))[1])
    monkeypatch.setattr(folders, "_FIND", 0.0)
    monkeypatch.setattr(folders, "_SHARE", 0.0)  # a slow machine would wait longer
    watched = Following(tmp_path)
    for _ in range(3):
        assert [g.status for g in watched.look().values()] == ["finished", "stopped"]
    assert read == ["a", "b"]
    add_lines(tmp_path / "b", round_of(3))
    assert watched.look()["b"].round == 3
    assert read == ["a", "b", "b"]


def test_a_file_that_is_replaced_by_one_as_long_and_as_old_is_read_again(tmp_path):
    run = make_run(tmp_path / "a", 2, planned=7)
    watched = Following(tmp_path)
    assert watched.look()["a"].planned == 7
    config = run / "config.toml"
    made = config.stat()
    other = run / "other"
    other.write_text(config.read_text().replace("rounds = 7", "rounds = 8"))
    os.utime(other, ns=(made.st_atime_ns, made.st_mtime_ns))
    other.replace(config)
    until(lambda: watched.look()["a"].planned == 8, "the new file")


def test_a_run_that_is_deleted_while_it_is_watched(tmp_path):
    run = make_run(tmp_path / "a", 2)
    with served(tmp_path, draw=plain) as page:
        told = since(page, "/run/a")
        with page.stream(f"/api/runs/a/events?since={told}") as stream:
            shutil.rmtree(run)
            found = stream.next()
            assert found["parts"]["state"]["state"]["status"] == "gone"
            assert "rounds" in found["order"]  # what was shown stays
        assert "no run" in page.get("/").text
        assert page.post("/api/runs/a/stop").status == 404


def test_a_run_that_cannot_be_read_is_said_so(tmp_path, monkeypatch):
    make_run(tmp_path / "a", 2)
    make_run(tmp_path / "b", 2)
    forbidden = {"a"}

    def reading(path, name):
        if name in forbidden:
            raise PermissionError(13, "Permission denied")
        return read_run(path, name)

    monkeypatch.setattr(folders, "read_run", reading)
    with served(tmp_path, draw=plain) as page:
        text = page.get("/").text
        assert "It cannot be read: Permission denied." in text
        assert "2 / 10" in text  # the other one
        assert "Cannot be read" in page.get("/run/a").text
        assert page.post("/api/runs/a/resume").status == 409
        told = since(page, "/run/a")
        with page.stream(f"/api/runs/a/events?since={told}") as stream:
            forbidden.clear()
            assert "round 2 of 10" in words(stream.next())


def test_files_that_somebody_wrote_by_hand_do_not_end_the_page(tmp_path, monkeypatch):
    make_run(tmp_path / "good", 2)
    bad = make_run(tmp_path / "bad", 0)
    add_lines(bad, {"round": 1, "groups": [[1], {}], "total_bytes": 5, "received": [], "notes": 1})
    add_lines(make_run(tmp_path / "odd", 1), round_of(2, received="?", cohort=None, seconds=[]))

    make_run(tmp_path / "worse", 1)
    glance_at = folders._glance_at

    def glancing(reading, path, name, stamp):
        if name == "worse":
            raise TypeError("of a kind that nobody thought of")
        return glance_at(reading, path, name, stamp)

    monkeypatch.setattr(folders, "_glance_at", glancing)

    def draw(reading):
        raise TypeError("<b>no</b>")

    with served(tmp_path, draw=draw) as page:
        with page.stream("/api/events") as stream:
            text = json.dumps(stream.next())
            assert "2 / 10" in text
            assert "'groups' has values of the wrong type" in unescape(text)
            assert "It cannot be read: of a kind that nobody thought of." in text
            add_lines(tmp_path / "good", round_of(3))
            assert "3 / 10" in json.dumps(stream.next())
        assert "cannot be drawn (TypeError: &lt;b&gt;no&lt;/b&gt;)" in page.get("/run/good").text
        assert page.get("/run/bad").status == page.get("/run/odd").status == 200
        assert "cannot be drawn" in page.get("/run/worse").text  # it was tried


def test_markup_in_names_and_unknown_events(tmp_path):
    name = "<img src=x onerror=alert(1)>&"
    run = make_run(tmp_path / name, 2)
    (run / "config.toml").write_text('[method]\nname = "<script>alert(2)</script>"\n')
    add_lines(run, {"round": 2, "event": "<b>odd</b>"})
    with served(tmp_path) as page:
        with page.stream("/api/events") as stream:
            sent = stream.next()["parts"][row_id(name)]["html"]
        for text in (page.get("/").text, page.get(f"/run/{name_in_url(name)}").text, sent):
            assert "&lt;img src=x onerror=alert(1)&gt;&amp;" in text
            assert "has 1 event of kind" in text
            for bad in ("<img", "<script>alert", "<b>odd"):
                assert bad not in text


def name_in_url(name):
    from urllib.parse import quote

    return quote(name)


def test_a_name_that_is_no_text(tmp_path):
    try:
        make_run(Path(f"{tmp_path}/a\udcff"), 1)
    except OSError:
        pytest.skip("this file system has only names that are text")
    with served(tmp_path, draw=plain) as page:
        assert page.get("/run/a%3F").status == 200
        assert "a?" in page.get("/").text


def test_links_are_not_followed(tmp_path):
    make_run(tmp_path / "elsewhere" / "secret", 1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere" / "secret")
    with served(tmp_path / "runs") as page:
        assert page.get("/run/link").status == 404


# --- who may see and do what ------------------------------------------------------------------

TRICKS = (
    "/run/..%2f..%2fetc",
    "/run/../b/a",
    "/run/%2e%2e/a",
    "/run//etc",
    "/run/a/../a",
    "/run/a%00",
    "/assets/x/..%2f..%2fapp.py",
    "/assets/x/live.css",
)


@pytest.mark.parametrize("path", TRICKS)
def test_paths_are_never_made_of_addresses(tmp_path, path):
    make_run(tmp_path / "runs" / "a", 1)
    make_run(tmp_path / "b" / "a", 1)
    with served(tmp_path / "runs", draw=plain) as page:
        assert page.get(path).status == 404


def test_what_changes_something_needs_the_token(tmp_path):
    run = make_run(tmp_path / "a", 1)
    lock = RunDir(run)
    lock.lock()  # as a run that goes on does
    with served(tmp_path, draw=plain) as page:
        own = f"http://127.0.0.1:{page.port}"
        for headers, status in (
            ({"token": None}, 403),
            ({"token": "wrong"}, 403),
            ({"token": TOKEN + "x"}, 403),
            ({"token": "é"}, 403),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": "http://127.0.0.1:1"}, 403),
            ({"Origin": "http://["}, 403),
            ({"Sec_Fetch_Site": "cross-site"}, 403),
            ({"Sec_Fetch_Site": "same-site"}, 403),
            ({"Host": f"evil.example:{page.port}"}, 400),
            ({"Host": "127.0.0.1.evil.example"}, 400),
        ):
            assert page.post("/api/runs/a/stop", **headers).status == status, headers
        assert not (run / ".stop").exists()
        assert page.get("/api/runs/a/stop").status == 405
        assert page.post("/api/runs/none/stop").status == 404
        assert page.post("/api/runs/a/stop", Origin=own, Sec_Fetch_Site="same-origin").status == 204
        assert (run / ".stop").exists()
        twice = page.post("/api/runs/a/stop")
        assert (twice.status, "already asked" in twice.text) == (409, True)
        assert page.post("/api/runs/a/resume").text == "a is running"
    lock.unlock()


@pytest.mark.parametrize("path", ["/", "/run/a", "/api/events"])
def test_other_names_for_this_machine_are_refused(tmp_path, path):
    make_run(tmp_path / "a", 1)
    with served(tmp_path, draw=plain) as page:
        refused = page.get(path, Host="rebound.example")
        assert (refused.status, "fedavg" in refused.text) == (400, False)
        if path != "/api/events":
            for name in ("localhost:9", f"127.0.0.1:{page.port}", "[::1]:80"):
                assert page.get(path, Host=name).status == 200


def test_headers_and_scripts(tmp_path):
    make_run(tmp_path / "a", 1)
    with served(tmp_path) as page:
        for path in ("/", "/run/a", "/run/none"):
            answer = page.get(path)
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
            assert "unsafe-eval" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in answer.headers
            for script in re.findall(r"<script>(.*?)</script>", answer.text, re.S):
                digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
                assert f"'sha256-{digest}'" in policy
        assert TOKEN not in page.get("/run/a").text
        (library,) = re.findall(r'src="([^"]+)"', page.get("/run/a").text)
        assert library.startswith("/assets/")
        assert page.get(library).headers["cache-control"].endswith("immutable")
        assert 'src="' not in page.get("/").text  # the list has no figures


def test_elsewhere_than_on_loopback_nothing_is_shown_without_the_token(tmp_path):
    make_run(tmp_path / "a", 1)
    with served(tmp_path, "0.0.0.0", draw=plain) as page:
        for path in ("/", "/run/a", "/api/events", "/api/runs/a/events"):
            answer = page.get(path)
            assert answer.status == 401
            assert "fedavg" not in answer.text
        assert "This page needs the token" in page.get("/").text
        assert page.post("/api/login", token="wrong").status == 403
        cookie = page.post("/api/login").headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        kept = cookie.split(";")[0]
        assert page.get("/run/a", Cookie=kept).status == 200
        assert page.get("/", Cookie=f"{kept}0").status == 401
        assert page.post("/api/runs/a/resume", token=None, Cookie=kept).status == 403


# --- stopping and resuming --------------------------------------------------------------------


def sessions(run, argv, folder):
    (run / "sessions.jsonl").write_text(json.dumps({"argv": argv, "folder": str(folder)}) + "\n")
    return read_run(run)


def test_what_is_started_to_go_on_with_a_run(tmp_path):
    run = make_run(tmp_path / "a", 1)
    plainly = (["run", "--resume", str(run)], tmp_path)
    assert command(read_run(run)) == plainly
    for argv in (["run", "--dir", "a"], ["compare"], None, ["rm", "-rf", "/"], "serve", [1]):
        assert command(sessions(run, argv, tmp_path)) == plainly
    served = ["serve", "c.toml", "--dir", "a"]
    assert command(sessions(run, served, tmp_path)) == (served, tmp_path)
    for wrong in (["serve", "c.toml"], ["serve", "--dir", "b"], [*served, "--dir=b"]):
        with pytest.raises(RunDirError, match="give its coterie serve command again"):
            command(sessions(run, wrong, tmp_path))
    with pytest.raises(RunDirError, match="does not exist any more"):
        command(sessions(run, served, tmp_path / "none"))
    (run / "flower").mkdir()
    with pytest.raises(RunDirError, match="its coterie serve command is not known"):
        command(sessions(run, None, tmp_path))
    (run / "config.toml").write_text("[python]\nmethod = 'fedavg'\n")
    with pytest.raises(RunDirError, match="was made in Python"):
        command(read_run(run))


def test_what_is_not_done_twice_or_in_vain(tmp_path):
    run = make_run(tmp_path / "sweep" / "a", 1)
    read_run(run)  # the first reading of a process takes longer, and the page then rests longer
    with served(tmp_path, draw=plain) as page:
        assert page.post("/api/runs/sweep/a/stop").text == "sweep/a is not running"
        above = RunDir(tmp_path / "sweep")
        above.lock()
        busy = page.post("/api/runs/sweep/a/resume")
        assert (busy.status, busy.text.split(",")[0]) == (409, "a process is working in sweep")
        above.unlock()
        (run / "result.json").write_text('{"method": "fedavg"}')
        done = page.post("/api/runs/sweep/a/resume")
        assert (done.status, "is finished" in done.text) == (409, True)
    assert not (run / "resumed.log").exists()


def test_trackers_are_passed_on_to_the_process_that_goes_on(tmp_path, monkeypatch):
    started = []

    def start(words, folder, log):
        started.append(words[3:])
        return subprocess.Popen(["true"])

    monkeypatch.setattr(control, "_start", start)
    run = make_run(tmp_path / "a", 1)
    many = ["run", "--track=mlflow", "--track", "tensorboard", "--track", "mlflow", "--track"]
    for argv, expected in (
        (["run", "--dir", "a"], []),
        (["run", "--track", "tensorboard"], ["--track", "tensorboard"]),
        (many, ["--track", "tensorboard", "--track", "mlflow"]),
        (["run", "--track", "evil", "--track=--dir=x"], []),
        (["compare", "--track", "mlflow"], []),
        (None, []),
    ):
        reading = sessions(run, argv, tmp_path)
        controls = Controls()
        controls.resume(Following(tmp_path).look()["a"], reading)
        assert started.pop() == expected, argv


def test_a_pipe_in_place_of_a_file_stops_nobody(tmp_path):
    run = make_run(tmp_path / "a", 1)
    for name in ("resumed.log", "data.json", "exposure.csv", ".lock"):
        os.mkfifo(run / name)
    with served(tmp_path, draw=plain) as page:
        text = page.get("/run/a").text
        assert "data.json cannot be read: it is not a regular file." in text
        assert "exposure.csv cannot be read: it is not a regular file." in text

        def refused():
            answer = page.post("/api/runs/a/resume")
            return answer.status == 409 and "its resumed.log cannot be written" in answer.text

        assert refused()
        reader = os.open(run / "resumed.log", os.O_RDONLY | os.O_NONBLOCK)
        assert refused()  # also if somebody is at the other end
        os.close(reader)
    assert control._last_words(run / "resumed.log", 1).endswith("(code 1); more in resumed.log")
    (run / "resumed.log").unlink()
    (run / "resumed.log").symlink_to(tmp_path / "elsewhere")
    watched = Following(tmp_path)
    with pytest.raises(RunDirError, match=r"its resumed\.log cannot be written"):
        Controls().resume(watched.look()["a"], watched.reading("a"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_of_another_user_is_seen_to_be_running(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", 1)
    held = RunDir(run)
    held.lock()
    opened = os.open

    def only_read(path, flags, *more, **named):
        if str(path).startswith(str(run)) and flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", only_read)
    assert read_run(run).status == Following(tmp_path).look()["a"].status == "running"
    monkeypatch.undo()
    held.unlock()
    assert read_run(run).status == "stopped"


def test_a_finished_run_that_is_given_more_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_SHARE", 0.0)
    run = make_run(tmp_path / "a", 2, planned=2)
    score = {"accuracy": 0.99, "worst": 0.9}
    result = {"method": "fedavg", "rounds": 2, "judged_by": "accuracy", "headline": "received"}
    (run / "result.json").write_text(json.dumps({**result, "received": score}))
    watched = Following(tmp_path)
    assert (watched.look()["a"].status, watched.look()["a"].score) == ("finished", 0.99)
    working = RunDir(run)
    working.lock()
    working.append_session({"argv": ["run", "--resume", "a", "--rounds", "5"], "rounds": 5})
    add_lines(run, round_of(3))
    found = watched.look(search=True)["a"]
    now = round_of(3)["received"]["accuracy"]
    assert (found.status, found.round, found.planned, found.score) == ("running", 3, 5, now)
    working.unlock()
    found = watched.look()["a"]
    assert (found.status, found.score) == ("stopped", now)
    assert state(found)["action"] == "resume"
    assert watched.reading("a").status == "stopped"
    add_lines(run, round_of(4), round_of(5))
    (run / "result.json").write_text(json.dumps({**result, "rounds": 5, "received": score}))
    found = watched.look()["a"]
    assert (found.status, found.score) == ("finished", 0.99)


def test_what_a_process_that_was_started_here_does(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", 1)
    monkeypatch.setattr(control, "_start", lambda *_: subprocess.Popen(["sleep", "60"]))
    controls = Controls()
    watched = Following(tmp_path, controls.doing)
    before = watched.look()["a"]
    assert before.status == "stopped"
    controls.resume(before, watched.reading("a"))
    with pytest.raises(RunDirError, match="being resumed already"):
        controls.resume(before, watched.reading("a"))  # who clicked twice saw it like this
    assert watched.look()["a"].status == "starting"
    with pytest.raises(RunDirError, match="being resumed already"):
        controls.resume(watched.look()["a"], watched.reading("a"))
    with pytest.raises(RunDirError, match="is just starting"):
        controls.stop(watched.look()["a"])
    working = RunDir(run)
    working.lock()
    working.append_session({"argv": None})
    assert watched.look()["a"].status == watched.reading("a").status == "running"
    working.unlock()
    changes = watched.changes("a")
    assert watched.look()["a"].status == "stopping"  # until it has ended
    assert watched.reading("a").status == "stopped"  # no file says so: it is drawn again for that
    assert watched.changes("a") > changes
    process = controls._started[run].process
    process.terminate()
    process.wait()
    assert watched.look()["a"].status == "stopped"
    controls.reap()
    assert controls.failure(run) == "its process, started from here, was ended by signal 15"


def test_a_federation_that_waits_for_its_clients(tmp_path):
    run = make_run(tmp_path / "a", 1)
    (run / "flower").mkdir()
    serving = RunDir(run / "flower")
    serving.lock()
    watched = Following(tmp_path)
    assert watched.look()["a"].status == "waiting"
    assert state(watched.look()["a"])["action"] == "stop"
    RunDir(run).ask_to_stop()
    assert watched.look()["a"].status == "stopping"
    serving.unlock()
    assert watched.look()["a"].status == "stopped"


def test_a_federation_that_waits_for_its_first_clients(tmp_path):
    place = tmp_path / "a"
    (place / "flower").mkdir(parents=True)
    serving = RunDir(place / "flower")
    serving.lock()
    watched = Following(tmp_path)
    assert {n: run.status for n, run in watched.look().items()} == {"a": "waiting"}
    assert watched.reading("a") is None
    Controls().stop(watched.look()["a"])
    assert watched.look()["a"].status == "stopping"
    RunDir.create(place)  # who asked in the last moment before it begins is in nobody's way
    serving.unlock()
    assert watched.look(search=True) == {}  # it never began: there is nothing to go on with
    serving.lock()
    assert watched.look(search=True)["a"].status == "stopping"
    shutil.copytree(make_run(tmp_path / "b", 2), place, dirs_exist_ok=True)
    assert watched.look()["a"].round == 2
    serving.unlock()


def test_a_federation_says_who_took_part(tmp_path):
    run = make_run(tmp_path / "a", 0)
    (run / "data.json").write_text(json.dumps({"names": ["north", "<south>", "", ""]}))
    add_lines(
        run,
        round_of(1, spared=0),
        {"round": 2, "event": "arrival", "clients": [3], "groups": [0]},
        round_of(2, spared=10, cohort=[0, 1], lost=1, rejected={"1": "it sent <nan>"}),
    )
    with served(tmp_path) as page:
        text = page.get("/run/a").text
    about = text[text.index('id="federation"') :]
    about = about[: about.index("</dl>")]
    assert "<dd>north, &lt;south&gt;</dd>" in about
    assert "client 3 (round 2)" in about
    assert "it sent &lt;nan&gt;" in about


# --- the command ------------------------------------------------------------------------------


def test_sentences_of_the_command(tmp_path, monkeypatch):
    import socket

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        commands.watch(tmp_path / "file")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot use port {port} of 127.0.0.1.*--port 0"):
            commands.watch(tmp_path, port=port)
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        commands.watch(tmp_path, host="no.such.host.invalid")
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the extra: pip install 'coterie\[live\]'"):
        commands.watch(tmp_path)


def test_a_run_that_ends_is_finished_once_nobody_works_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_SHARE", 0.0)
    run = make_run(tmp_path / "a", 2)
    held = RunDir(run)
    held.lock()
    watched = Following(tmp_path)
    assert watched.look()["a"].status == "running"
    (run / "result.json").write_text('{"method": "fedavg"}')
    assert watched.look()["a"].status == "running"  # it leaves, still
    held.unlock()
    assert watched.look()["a"].status == "finished"
    reading = watched.reading("a")
    assert reading is not None
    assert reading.status == "finished"
