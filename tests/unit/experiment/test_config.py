"""One configuration from a file, from flags and from --set; what is wrong is said in a sentence."""

import tomllib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from coterie.errors import ConfigError, DataError
from coterie.experiment.compare.compare import method_list
from coterie.experiment.config import (
    Config,
    assign,
    assign_texts,
    experiment_of,
    parse,
    population_of,
    read_start,
)
from coterie.results.toml import read_toml, to_toml

SMALL = {"data": {"clients": 3, "samples": 60}, "run": {"engine": "loop"}}

# Everything that TOML can hold and a configuration may: no None, no dates.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
parameters = st.dictionaries(texts.filter(lambda k: k not in FIXED), values, max_size=4)
FIXED = {"name", "init", "start", "freeze", "bn"}


@given(
    options=st.dictionaries(texts, values, max_size=4),
    method=parameters,
    model=parameters,
    folder=texts,
    freeze=st.lists(texts, max_size=3),
    lr=st.floats(min_value=1e-300, allow_infinity=False, allow_nan=False),
    cohort=st.integers(1, 10**6) | st.floats(min_value=1e-9, max_value=1.0),
    clip=st.none() | st.floats(min_value=1e-9, max_value=1e9),
    alone=st.booleans(),
)
def test_written_and_read_again_it_is_the_same(
    options, method, model, folder, freeze, lr, cohort, clip, alone
):
    config = parse(
        {
            "data": {"options": options, "folder": folder},
            "method": {"name": "mine", **method},
            "model": {"freeze": freeze, **model},
            "train": {"lr": lr, "clip": clip},
            "run": {"cohort": cohort},
            "evaluation": {"alone": alone},
        }
    )
    again = parse(tomllib.loads(to_toml(config.model_dump())))
    assert again == config
    assert type(again.run.cohort) is type(config.run.cohort)  # 1 is a client, 1.0 is everybody
    assert to_toml(again.model_dump()) == to_toml(config.model_dump())


def test_the_default_survives_a_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(Config().model_dump()))
    assert parse(read_toml(path)) == Config()


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"run": {"round": 5}}, ["'run.round'", "did you mean 'run.rounds'"]),
        ({"trian": {"lr": 1}}, ["'trian'", "did you mean 'train'"]),
        ({"train": {"optimiser": "sgd"}}, ["'train.optimiser'", "'train.optimizer'"]),
        ({"run": {"rounds": 0}}, ["run.rounds = 0", "must be at least 1"]),
        ({"data": {"public": 0}}, ["data.public = 0", "must be 'auto' or at least 1"]),
        ({"run": {"rounds": "many"}}, ["run.rounds = 'many'", "integer"]),
        ({"train": {"lr": -1.0}}, ["train.lr = -1.0", "greater than 0"]),
        ({"train": {"lr": float("nan")}}, ["train.lr = nan"]),
        ({"run": {"cohort": 0}}, ["run.cohort = 0", "greater than 0"]),
        ({"data": {"test_fraction": 1.0}}, ["data.test_fraction = 1.0", "less than 1"]),
        ({"model": {"name": 3}}, ["model.name = 3", "string"]),
        ({"run": 3}, ["run = 3"]),
    ],
)
def test_a_wrong_key_or_value_is_named(tree, told):
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    for part in told:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"method": {"name": "fedagv"}}, "did you mean 'fedavg'"),
        ({"method": {"name": "fedprox", "nu": 1}}, "did you mean 'mu'"),
        ({"method": {"name": "ifca"}}, "'k'"),
        ({"method": {"name": "ifca", "k": "abc"}}, "k = 'abc'"),
        ({"method": {"name": "ifca", "k": 2.5}}, "k = 2.5"),
        ({"method": {"name": "ifca", "k": 0}}, "k = 0: must be at least 1"),
        ({"method": {"name": "fedprox", "mu": [1]}}, "mu = [1]"),
        ({"model": {"name": "mpl"}}, "did you mean 'mlp'"),
        ({"model": {"name": "mlp", "hiden": [3]}}, "did you mean 'hidden'"),
        ({"model": {"freeze": ["hidden"]}}, "did you mean 'hidden1'"),
        ({"model": {"bn": "lokal"}}, "did you mean 'local'"),
        ({"model": {"init": "glorto"}}, "'glorto'; did you mean 'glorot'"),
        ({"model": {"start": "nowhere.safetensors"}}, "there is no file nowhere.safetensors"),
        ({"train": {"optimizer": "adma"}}, "did you mean 'adam"),
        ({"train": {"loss": "mes"}}, "did you mean 'mse'"),
        ({"train": {"loss": "mse"}}, "does not fit targets that are classes"),
        ({"run": {"engine": "pol"}}, "did you mean 'pool'"),
        ({"run": {"device": "abacus"}}, "run.device = 'abacus' is not available"),
        ({"run": {"cohort": 4}}, "number from 1 to 3"),
        ({"data": {"set": "digit"}}, "did you mean 'digits'"),
        ({"data": {"options": {"file": "x"}}}, "takes no parameters"),
        ({"partition": {"name": "dirichlt"}}, "did you mean 'dirichlet'"),
        ({"partition": {"name": "dirichlet", "alfa": 1}}, "did you mean 'alpha'"),
        ({"shift": {"name": "rotate"}}, "did you mean 'rotation'"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_closest_name(tree, told):
    merged = {k: {**SMALL.get(k, {}), **tree.get(k, {})} for k in {**SMALL, **tree}}
    with pytest.raises(ConfigError) as caught:
        experiment_of(parse(merged))
    assert told in str(caught.value)


def test_method_names_are_checked_before_data_is_read():
    config = parse({"method": {"name": "fedagv"}, "data": {"set": "mnist", "folder": "/nowhere"}})
    with pytest.raises(ConfigError, match="fedagv"):
        experiment_of(config)


def test_another_name_drops_the_old_ones_parameters():
    tree = {"model": {"name": "mlp", "hidden": [9], "freeze": ["head"]}}
    assign(tree, "model.name", "logistic")
    assert tree == {"model": {"name": "logistic", "freeze": ["head"]}}
    tree = {"model": {"hidden": [9]}}  # those of the default
    assign(tree, "model.name", "logistic")
    assert tree == {"model": {"name": "logistic"}}
    tree = {"model": {"hidden": [9]}}
    assign(tree, "model.name", "mlp")
    assert tree == {"model": {"hidden": [9], "name": "mlp"}}


def test_the_order_of_sets_does_not_matter():
    one, other = {"method": {"name": "ifca", "k": 3}}, {"method": {"name": "ifca", "k": 3}}
    assign_texts(one, ["method.name=fedprox", "method.mu=0.25"])
    assign_texts(other, ["method.mu=0.25", "method.name=fedprox"])
    assert one == other == {"method": {"name": "fedprox", "mu": 0.25}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"a = b"', "a = b"),
        ("word", "word"),
        ("a=b", "a=b"),
        ("", ""),
        ('{ x = 1, y = "z" }', {"x": 1, "y": "z"}),
    ],
)
def test_values_are_written_as_in_toml_or_as_bare_words(text, value):
    tree = {}
    assign_texts(tree, [f"data.options.key={text}"])
    assert tree == {"data": {"options": {"key": value}}}


@pytest.mark.parametrize("text", ["rounds=5", "run.rounds", "run.rounds.x=5", "=3"])
def test_what_is_not_section_key_value_is_refused(text):
    with pytest.raises(ConfigError):
        assign_texts({"run": {"rounds": 3}}, [text])


def test_files_that_are_not_toml(tmp_path):
    path = tmp_path / "x.toml"
    with pytest.raises(ConfigError, match="there is no configuration file"):
        read_toml(path)
    path.write_text("[run\nrounds = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(path)
    path.write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_toml(tmp_path)


def test_start_weights_must_be_a_safetensors_file_of_that_model(tmp_path):
    path = tmp_path / "start.safetensors"
    path.write_text("not that")
    with pytest.raises(DataError, match="not a safetensors file"):
        read_start(str(path))
    save_file({"head.weight": torch.zeros(2, 2)}, path)
    config = parse({**SMALL, "model": {"name": "logistic", "start": str(path)}})
    with pytest.raises(ConfigError, match="has shape"):
        experiment_of(config)


def test_building_options_reach_the_builder(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a,b,y\n" + "".join(f"{i},{i * i},{i % 2}\n" for i in range(30)))
    tree = {
        "data": {"set": "csv", "folder": str(file), "clients": 2, "options": {"label": "y"}},
    }
    scaled = population_of(parse(tree))
    tree["data"]["options"]["standardize"] = False
    plain = population_of(parse(tree))
    assert plain.mean is None
    assert float(plain.clients[0].train.x.max()) > 100 > float(scaled.clients[0].train.x.max())


def test_lists_of_methods():
    assert method_list("local, ifca:k=4") == [
        ("local", "local", {}),
        ("ifca k=4", "ifca", {"k": 4}),
    ]
    assert method_list("x:layers=[1, 2]:word=a,y") == [
        ("x layers=[1, 2] word=a", "x", {"layers": [1, 2], "word": "a"}),
        ("y", "y", {}),
    ]
    with pytest.raises(ConfigError, match="name:parameter=value"):
        method_list("ifca:4")
    with pytest.raises(ConfigError, match="twice"):
        method_list("fedavg,fedavg")
