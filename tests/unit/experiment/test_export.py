"""Exported files: the same bytes for the same model, whatever made it."""

import itertools

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

import coterie
from coterie.core.tree import to_safetensors
from coterie.experiment.experiment import execute
from coterie.experiment.export import export_model
from support import Stop, experiment, stop_after


def exported(result, place):
    export_model(result, 3, place)
    return place.read_bytes()


def test_an_export_is_the_same_file_on_each_engine_and_after_a_resume(tmp_path):
    def made(engine):
        return experiment(coterie.fedper(k=1), settings={"engine": engine, "workers": 2})

    with pytest.raises(Stop):
        execute(made("loop"), tmp_path / "run", watch=stop_after(2))
    results = {
        "loop": execute(made("loop")),
        "pool": execute(made("pool")),
        "resumed": execute(made("loop"), tmp_path / "run", resume=True),
    }
    files = {name: exported(r, tmp_path / f"{name}.st") for name, r in results.items()}
    assert files["loop"] == files["pool"] == files["resumed"]
    with safe_open(tmp_path / "loop.st", framework="pt") as file:
        assert file.metadata()["method"] == "fedper"
        assert file.metadata()["client"] == "3"


def test_a_file_does_not_depend_on_the_order_of_what_is_told():
    tensors = {"b.weight": torch.randn(3, 2), "a": torch.arange(5.0)[::2]}
    about = {"ä": "1", "b": '["x"]', "c": "", "d": "\n"}
    files = {
        to_safetensors(tensors, dict(order)) for order in itertools.permutations(about.items())
    }
    (data,) = files
    assert {n: t.tolist() for n, t in load(data).items()} == {
        n: t.tolist() for n, t in tensors.items()
    }
    assert int.from_bytes(data[:8], "little") % 8 == 0
