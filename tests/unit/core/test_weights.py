"""Layouts and weights."""

import pytest
import torch
from torch import nn

from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError


def network():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Linear(4, 3))


def test_parameters_come_first_then_frozen_then_buffers():
    module = network()
    module[0].weight.requires_grad_(False)
    layout = Layout.of(module)
    assert [e.kind for e in layout.entries] == ["parameter"] * 5 + ["frozen"] + ["buffer"] * 2
    assert layout.trainable == 2 + 2 + 2 + 12 + 3  # conv bias, γ, β, linear
    assert layout.size == layout.trainable + 18 + 4


def test_a_normalisation_belongs_to_the_layer_before_it():
    layout = Layout.of(network())
    assert layout.layers == ("0", "3")
    assert {e.name for e in layout.entries if e.layer == "0"} == {
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"
    }  # fmt: skip


def test_step_counts_of_batch_norm_never_travel():
    assert not [e for e in Layout.of(network()).entries if "num_batches" in e.name]


@pytest.mark.parametrize(
    ("bn", "stay"),
    [
        ("shared", set()),
        ("stats-local", {"1.running_mean", "1.running_var"}),
        ("local", {"1.running_mean", "1.running_var", "1.weight", "1.bias"}),
    ],
)
def test_bn_decides_what_is_shareable(bn, stay):
    layout = Layout.of(network(), bn)
    assert set(layout.names) - set(layout.shareable) == stay


def test_unknown_bn_and_layer_are_refused_by_name():
    with pytest.raises(ConfigError, match="did you mean 'local'"):
        Layout.of(network(), "locall")
    with pytest.raises(ConfigError, match="unknown layer '7'"):
        Layout.of(network()).only(["7"])


def test_arithmetic_makes_new_values():
    layout = Layout.of(nn.Linear(1, 2))
    a = Weights(layout, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    b = Weights(layout, torch.tensor([1.0, 1.0, 1.0, 1.0]))
    assert (a + b).vector.tolist() == [2, 3, 4, 5]
    assert (a - b).vector.tolist() == [0, 1, 2, 3]
    assert (2 * a).vector.tolist() == (a * 2).vector.tolist() == [2, 4, 6, 8]
    assert a.vector.tolist() == [1, 2, 3, 4]
    assert b.norm() == 2


def test_norm_is_of_trained_parameters_only():
    module = network()
    weights = Weights.of(module)
    expected = sum(float(p.detach().square().sum()) for p in module.parameters()) ** 0.5
    assert weights.norm() == pytest.approx(expected, rel=1e-6)


def test_only_and_onto_put_layers_back_where_they_were():
    weights = Weights.of(network())
    zero = weights * 0
    part = weights.only(["3", "1.bias"])
    whole = part.onto(zero)
    for name, tensor in whole.tensors().items():
        kept = name.startswith("3.") or name == "1.bias"
        assert torch.equal(tensor, weights.tensors()[name] if kept else zero.tensors()[name])
    assert float(zero.vector.abs().sum()) == 0


def test_different_layouts_do_not_mix():
    a, b = Weights.of(nn.Linear(1, 2)), Weights.of(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="different layouts"):
        a + b
    with pytest.raises(ConfigError, match="not part of this model"):
        a.part(b.layout)


def test_from_tensors_names_what_does_not_fit():
    layout = Layout.of(nn.Linear(1, 2))
    with pytest.raises(ConfigError, match="'bias' is missing"):
        Weights.from_tensors(layout, {"weight": torch.zeros(2, 1)})
    with pytest.raises(ConfigError, match=r"'weight' has shape \(1, 2\), not \(2, 1\)"):
        Weights.from_tensors(layout, {"weight": torch.zeros(1, 2), "bias": torch.zeros(2)})
    with pytest.raises(ConfigError, match="do not fit"):
        Weights(layout, torch.zeros(3))
