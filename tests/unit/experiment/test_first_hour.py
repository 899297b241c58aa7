"""Twenty things that a newcomer tries first: each works, or ends in one sentence that helps."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.errors import CoterieError
from registries import restored

QUICK = {"rounds": 2, "engine": "loop"}


def people(count=4, width=3, classes=2, samples=30):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(samples, width, generator=generator) for _ in range(count)]
    return [(x, (x[:, 0] > 0).long() % classes) for x in rows]


def sentence(call, *, names):
    """The error of a call: one line, no traceback, that names what to change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CoterieError) as caught:
            call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    assert re.search(names, text), text
    return text


# --- what works ----------------------------------------------------------------------------------


def test_01_a_list_of_tensors():
    assert 0 <= coterie.simulate(people(), **QUICK).accuracy <= 1


def test_02_numpy_arrays_and_plain_lists():
    arrays = [(x.numpy(), y.numpy()) for x, y in people()]
    lists = [(x.tolist(), y.tolist()) for x, y in people()]
    first, second = (coterie.simulate(data, **QUICK) for data in (arrays, lists))
    assert first.accuracy == second.accuracy


def test_03_an_own_module_as_object_function_and_class():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for model in (net, lambda: nn.Linear(3, 2)):
        assert coterie.simulate(people(), model, **QUICK).model(0) is not None


def test_04_an_own_loss_and_an_own_metric():
    def loss(outputs, y):
        return nn.functional.cross_entropy(outputs, y, label_smoothing=0.1)

    def mistakes(outputs, y):
        return (outputs.argmax(1) != y).float().mean()

    result = coterie.simulate(people(), loss=loss, metrics={"mistakes": mistakes}, **QUICK)
    score = result.summary["received"]
    assert score["mistakes"] == pytest.approx(1 - score["accuracy"])


def test_05_a_method_by_name_with_parameters_and_as_object():
    by_name = coterie.simulate(people(), method="ifca:k=2", **QUICK)
    assert by_name.groups == coterie.simulate(people(), method=coterie.ifca(k=2), **QUICK).groups


def test_06_an_own_method_beside_others():
    own = coterie.grouped("own", coterie.by_loss(2))
    compared = coterie.compare(people(), ["local", "fedavg", own], **QUICK)
    assert [row["method"] for row in compared.rows] == ["local", "fedavg", "own"]


def test_07_an_own_method_from_a_file_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import coterie\n\n\n@coterie.method\ndef mine(k: int = 2):\n"
        '    """Mine."""\n    return coterie.grouped("mine", coterie.by_loss(k))\n'
    )
    flags = ["--clients", "4", "--rounds", "1", "--set", "data.samples=120", "--dir", "both"]
    with restored():
        told = CliRunner().invoke(
            app, ["compare", "--methods", "local", "--method", "mine.py:mine:k=3", *flags]
        )
    assert told.exit_code == 0, told.output
    assert "mine.py:mine k=3" in told.output


def test_08_printing_what_comes_back():
    result = coterie.simulate(people(), **QUICK)
    for thing in (result, result.plan.population, coterie.fedavg(), result.weights(0)):
        assert len(repr(thing)) < 800
        assert "tensor(" not in repr(thing)


def test_09_predicting_with_the_model_of_a_client():
    result = coterie.simulate(people(), **QUICK)
    assert result.predict(1, torch.randn(5, 3)).shape == (5, 2)


def test_10_one_client_and_one_sample_more():
    assert coterie.simulate(people(1), **QUICK).groups == {0: 0}


# --- what ends in a sentence ---------------------------------------------------------------------


def test_11_a_wrong_method_name():
    text = sentence(lambda: coterie.simulate(people(), method="fedagv", **QUICK), names="'fedavg'")
    assert len(text) < 160  # the nearest names, not all


def test_12_a_wrong_setting():
    sentence(lambda: coterie.simulate(people(), learning_rate=0.1, **QUICK), names="called lr here")
    sentence(lambda: coterie.simulate(people(), epoch=1, **QUICK), names="'epochs'")


def test_13_a_missing_parameter():
    sentence(lambda: coterie.simulate(people(), method="ifca", **QUICK), names="'k'")


def test_14_a_factory_that_was_not_called():
    sentence(lambda: coterie.simulate(people(), method=coterie.ifca, **QUICK), names=r"ifca\(k=3\)")


def test_15_x_and_y_of_different_lengths():
    (x, y), *others = people()
    sentence(lambda: coterie.simulate([(x, y[:-1]), *others], **QUICK), names="client 0")


def test_16_clients_with_different_features():
    clients = [*people(2), *people(2, width=5)]
    sentence(lambda: coterie.simulate(clients, **QUICK), names=r"client [02]")


def test_17_a_model_that_does_not_fit_the_data():
    wide = nn.Linear(7, 2)
    sentence(lambda: coterie.simulate(people(), wide, **QUICK), names=r"7|shape|model")


def test_18_two_runs_in_one_folder(tmp_path):
    settings = {"directory": tmp_path / "run", **QUICK}
    coterie.simulate(people(), **settings)
    sentence(lambda: coterie.simulate(people(), **settings), names="resume|another|already")


def test_19_float_labels_are_told():
    floats = [(x, y.float()) for x, y in people(samples=60)]
    with pytest.warns(UserWarning, match=r"y\.long\(\)"):
        coterie.simulate(floats, **QUICK)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["run", "--method", "fedagv"], "fedavg"),
        (["run", "nothing.toml"], "nothing.toml"),
        (["run", "--set", "train.lrr=1"], "train.lr"),
        (["run", "--clients", "0"], "clients"),
        (["compare", "--methods", "ifca"], "k"),
        (["compare", "--tune", "method.mu=1,2", "--methods", "fedprox"], "vary"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_20_typos_on_the_command_line(arguments, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code != 0
    error = told.exception
    assert isinstance(error, CoterieError | SystemExit), error
    text = str(error) if isinstance(error, CoterieError) else told.output
    assert names in text
    assert "Traceback" not in told.output
    assert not (tmp_path / "runs").exists()


def test_21_nan_in_the_data_is_told():
    (x, y), *others = people()
    broken = x.clone()
    broken[3, 1] = np.nan
    sentence(lambda: coterie.simulate([(broken, y), *others], **QUICK), names="client 0|finite|NaN")
