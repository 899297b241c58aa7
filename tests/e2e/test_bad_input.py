"""Whatever is wrong: one sentence that says what to do, the exit code of its kind, no traceback."""

import gzip
import http.server
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.data import load
from coterie.experiment.export import reopen


def weights(directory, client=0):
    return reopen(Path(directory)).weights(client).vector


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--method fedagv", "did you mean 'fedavg'"),
        ("--data digit", "did you mean 'digits'"),
        ("--model mpl", "did you mean 'mlp'"),
        ("--partition dirichelt", "did you mean 'dirichlet'"),
        ("--shift rotations", "did you mean 'rotation'"),
        ("--engine poll", "did you mean 'pool'"),
        ("--set train.learning_rate=1", "unknown key 'train.learning_rate'"),
        ("--set run.round=1", "did you mean 'run.rounds'"),
        ("--set rnu.rounds=1", "did you mean 'run'"),
        ("--method fedprox --set method.nu=1", "did you mean 'mu'"),
        ("--method fedprox --set method.mu=much", "mu = 'much'"),
        ("--method fedprox --set method.mu=-1", "mu"),
        ("--method fedper --set method.k=9", "9 personal layers asked for"),
        ("--method oracle", "needs a scenario with known groups"),
        ("--cohort 9", "number from 1 to 4"),
        ("--cohort few", "run.cohort = 'few'"),
        ("--rounds 0", "run.rounds = 0"),
        ("--lr -1", "train.lr = -1.0"),
        ("--partition dirichlet --set partition.alpha=-1", "alpha = -1"),
        ("--set train.lr", "write section.key=value"),
        ("nowhere.toml", "there is no configuration file nowhere.toml"),
    ],
)
def test_a_wrong_name_key_or_value(cli, small, words, told):
    cli("run", *small, "--rounds", 1, *words.split(), "--dir", "r").says(2, told)


def test_a_wrong_name_leaves_no_folder_behind(cli, small):
    for words in ("--method fedagv", "--model mpl", "--set model.freeze=['x']"):
        assert cli("run", *small, *words.split(), "--dir", "r").code == 2
    assert not Path("r").exists()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("--clients 2000", 3, "use fewer clients"),
        ("--clients 150", 3, "with 1 samples"),  # of 200 samples: some would have one
        ("--set data.samples=99999", 3, "samples = 99999, but there are only 1797"),
        ("--set data.public=99999", 3, "lower public"),
        ("--partition shards --set partition.per_client=99", 3, "need 396 samples"),
        ("--partition column --set partition.by=site", 3, "unknown column 'site'"),
        ("--data csv --folder nowhere.csv --set data.options.label=y", 3, "does not exist"),
    ],
)
def test_data_that_cannot_be_had_or_divided(cli, small, words, code, told):
    cli("run", *small, *words.split(), "--dir", "r").says(code, told)
    assert not Path("r").exists()


def run_csv(cli, path, *more):
    words = ("run", "--data", "csv", "--folder", path, "--set", "data.options.label=kind")
    words += ("--set", 'data.options.columns=["site","target"]', "--clients", 2)
    return cli(*words, "--engine", "loop", "--rounds", 1, "--dir", "r", *more)


def test_numbers_that_are_none(cli, table):
    lines = table.read_text().splitlines()
    for bad, told in (("nan", "not a finite number"), ("", "not a number"), ("tall", "number")):
        fields = lines[7].split(",")
        fields[1] = bad
        table.write_text("\n".join([*lines[:7], ",".join(fields), *lines[8:]]))
        run_csv(cli, table).says(3, str(table), "line 8", "'weight'", told)


def test_arrays_with_nan_or_labels_outside(cli):
    x, y = np.zeros((40, 3)), np.arange(40) % 4
    words = ("run", "--data", "npz", "--clients", 2, "--folder", "d.npz", "--dir", "r")
    bad = x.copy()
    bad[5, 1] = np.nan
    np.savez("d.npz", x=bad, y=y)
    cli(*words).says(3, "nan at row 5, column 1")
    np.savez("d.npz", x=x, y=y)
    cli(*words, "--set", "data.options.classes=3").says(3, "label 3 at row 3", "outside 0..2")
    np.savez("d.npz", x=x, y=y - 1)
    cli(*words).says(3, "label -1 at row 0")
    np.savez("d.npz", x=x[:5], y=y)
    cli(*words).says(3, "5 samples but 40 labels")


def test_a_truncated_file(cli):
    np.savez("d.npz", x=np.zeros((40, 3)), y=np.arange(40) % 4)
    whole = Path("d.npz").read_bytes()
    Path("d.npz").write_bytes(whole[: len(whole) // 2])
    cli("run", "--data", "npz", "--folder", "d.npz", "--dir", "r").says(
        3, "d.npz", "get a new copy"
    )
    Path("mnist").mkdir()
    packed = gzip.compress(bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 4]) + bytes(32))
    Path("mnist/train-images-idx3-ubyte.gz").write_bytes(packed[:-9])
    words = ("run", "--data", "mnist", "--folder", ".", "--dir", "r")
    cli(*words).says(3, "train-images-idx3-ubyte.gz", "get a new copy")


def test_a_wrong_checksum(cli, tmp_path):
    class Wrong(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"wrong")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Wrong) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"data.options.mirror=http://127.0.0.1:{server.server_port}/"
        ended = cli("run", "--data", "mnist", "--set", mirror, "--dir", "r")
        server.shutdown()
    ended.says(3, "wrong checksum", "was deleted")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert not Path("r").exists()


@pytest.mark.parametrize("place", ["file/r", "/proc/coterie/r", "file"])
def test_a_folder_that_cannot_be_written(cli, small, place):
    Path("file").write_text("mine")
    ended = cli("run", *small, "--rounds", 1, "--dir", place)
    ended.says(4, place, "--dir")
    assert Path("file").read_text() == "mine"


def test_files_that_cannot_be_written(cli, small):
    Path("file").touch()
    np.save("x.npy", load("digits").x[:2])
    assert cli("run", *small, "--rounds", 1, "--dir", "r", "-q").code == 0
    cli("export", "r", "--client", 0, "--to", "file/m.safetensors").says(4, "cannot write")
    cli("export", "r", "--client", 0, "--to", "new/m.safetensors").says(4, "cannot write")
    cli("predict", "r", "x.npy", "--client", 0, "--to", "file/p.csv").says(2, "cannot write")
    cli("probe", *small[:4], "--picture", "file/p.html").says(4, "cannot write")


def test_a_folder_that_holds_something(cli, small):
    assert cli("run", *small, "--rounds", 1, "--dir", "r", "-q").code == 0
    before = {p: p.read_bytes() for p in Path("r").rglob("*") if p.is_file()}
    cli("run", *small, "--rounds", 1, "--dir", "r").says(4, "is not empty", "--resume r")
    cli("compare", *small, "--rounds", 1, "--dir", "r").says(4, "is not empty")
    assert {p: p.read_bytes() for p in Path("r").rglob("*") if p.is_file()} == before


def test_what_is_no_run(cli, small):
    Path("empty").mkdir()
    for words in (
        ("run", "--resume", "empty"),
        ("run", "--resume", "nowhere"),
        ("export", "empty", "--client", 0),
        ("predict", "empty", "x.npy", "--client", 0),
    ):
        cli(*words).says(4, "is not a run directory")


def test_a_client_or_samples_that_are_not_there(cli, small):
    assert cli("run", *small, "--rounds", 1, "--dir", "r", "-q").code == 0
    x = load("digits").x[:4]
    np.save("x.npy", x)
    cli("export", "r", "--client", 4).says(2, "no client 4; they are 0 to 3")
    cli("predict", "r", "x.npy", "--client", -1).says(2, "no client -1")
    cli("predict", "r", "nowhere.npy", "--client", 0).says(3, "there is no file nowhere.npy")
    Path("x.txt").touch()
    cli("predict", "r", "x.txt", "--client", 0).says(3, ".npy, .npz, .csv")
    Path("x.csv").write_text("a,b\n1,2\n")
    cli("predict", "r", "x.csv", "--client", 0).says(3, "images must be in an .npy")
    for bad, told in (
        (x[:, :, :4], "shape (4, 1, 4, 8)"),
        (x[:0], "no samples"),
        (x[0, 0, 0], "shape (8,)"),
        (x / 255, "pixels are fractions"),
        (x.astype(int) + 900, "0..255"),
        (np.array(["a"]), "must be numbers"),
    ):
        np.save("bad.npy", bad)
        cli("predict", "r", "bad.npy", "--client", 0).says(3, "bad.npy", told)
    Path("bad.npy").write_bytes(Path("x.npy").read_bytes()[:-9])
    cli("predict", "r", "bad.npy", "--client", 0).says(3, "bad.npy", "get a new copy")
    np.savez("bad.npz", samples=x)
    cli("predict", "r", "bad.npz", "--client", 0).says(3, "no array 'x'", "samples")


def test_a_table_that_is_not_the_runs(cli, table):
    assert run_csv(cli, table, "-q").code == 0
    Path("new.csv").write_text("height,wieght\n1,2\n")
    cli("predict", "r", "new.csv", "--client", 0).says(3, "unknown column 'weight'", "'wieght'")
    Path("new.csv").write_text("height,weight\n1,2\n3,nan\n")
    cli("predict", "r", "new.csv", "--client", 0).says(3, "line 3", "'weight'")
    np.save("new.npy", np.array([[1.0, np.inf]]))
    cli("predict", "r", "new.npy", "--client", 0).says(3, "new.npy", "row 0, column 1")
    np.save("new.npy", np.zeros((3, 5)))
    cli("predict", "r", "new.npy", "--client", 0).says(3, "(3, 5)", "(N, 2)")


def test_diverging_training_is_said_to(cli, small):
    ended = cli("run", *small, "--rounds", 9, "--lr", "1e20", "--dir", "r")
    ended.says(5, "client", "train.lr")


# --- checkpoints --------------------------------------------------------------------------------


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def newest(directory, ending):
    return sorted(Path(directory, "checkpoints").glob(f"*.{ending}"))[-1]


@pytest.mark.parametrize(
    ("method", "harm"),
    # Of both methods one: what finds the damage does not know what the arrays are.
    [("fedavg", "flipped")]
    + [("fedper", harm) for harm in ("flipped", "cut", "gone", "note", "empty note")],
)
def test_a_damaged_checkpoint_costs_a_round_and_no_bits(cli, small, harm, method):
    flags = ("run", *small, "--method", method, "-q")
    assert cli(*flags, "--rounds", 3, "--dir", "r").code == 0
    file, note = newest("r", "safetensors"), newest("r", "json")
    if harm == "flipped":
        damage(file)
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    elif harm == "gone":
        file.unlink()
    elif harm == "note":
        note.write_text(note.read_text()[:-3])
    else:
        note.write_text("")
    resumed = cli("run", "--resume", "r", "--rounds", 4)
    assert resumed.code == 0, resumed.err
    said, *progress = resumed.err.splitlines()
    assert "warning: r returns from round 3 to round 2" in said
    assert [line.split()[2] for line in progress] == ["3/4", "4/4"]
    assert cli(*flags, "--rounds", 4, "--dir", "whole").code == 0
    for client in range(4):
        assert torch.equal(weights("r", client), weights("whole", client))
    lines = Path("r/events.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]


def test_no_good_checkpoint_left(cli, small):
    assert cli("run", *small, "--rounds", 2, "--dir", "r", "-q").code == 0
    for path in Path("r/checkpoints").glob("*.safetensors"):
        damage(path)
    for words in (("run", "--resume", "r"), ("export", "r", "--client", 0)):
        cli(*words).says(4, "damaged", "Start the run again")
    assert Path("r/result.json").exists()  # what was there stays there
    shutil.rmtree("r/checkpoints")
    cli("export", "r", "--client", 0).says(4, "no checkpoint")


def test_anothers_checkpoint(cli, small):
    assert cli("run", *small, "--rounds", 1, "--seed", 1, "--dir", "a", "-q").code == 0
    assert cli("run", *small, "--rounds", 1, "--seed", 2, "--dir", "b", "-q").code == 0
    shutil.rmtree("a/checkpoints")
    shutil.copytree("b/checkpoints", "a/checkpoints")
    cli("run", "--resume", "a", "--rounds", 2).says(4, "belongs to another experiment")
    cli("export", "a", "--client", 0).says(4, "belongs to another experiment")


def test_a_damaged_configuration_or_result(cli, small):
    assert cli("run", *small, "--rounds", 1, "--dir", "r", "-q").code == 0
    Path("r/result.json").write_text('{"met')
    cli("export", "r", "--client", 0).says(4, "result.json", "--resume r")
    assert cli("run", "--resume", "r", "-q").code == 0
    assert cli("export", "r", "--client", 0).code == 0
    Path("r/config.toml").write_text("[run")
    cli("run", "--resume", "r").says(2, "config.toml", "not valid TOML")


def test_a_run_of_ones_own_data_is_continued_from_python(cli):
    import coterie

    people = [(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(2)]
    coterie.simulate(people, "logistic", rounds=1, engine="loop", directory="r")
    cli("run", "--resume", "r").says(2, "resume=True")
    cli("export", "r", "--client", 0).says(2, "model() in Python")


def test_a_real_process_ends_with_the_code_and_the_sentence_alone():
    ended = subprocess.run(
        [sys.executable, "-m", "coterie", "run", "--method", "fedagv"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: unknown method 'fedagv'; did you mean 'fedavg'?")
