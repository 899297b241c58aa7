"""Models: counts worked by hand, shapes, layer names, seeds, and refusals."""

import copy
import inspect
import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coterie.errors import ConfigError
from coterie.models import MODELS, make_model

IMAGE_MODELS = ("lenet5", "cnn", "cnn5", "resnet9", "resnet18", "vgg16")
NORMED = ("resnet9", "resnet18", "vgg16")
SMALL = {"resnet9": {"width": 4}, "resnet18": {"width": 4}, "vgg16": {"width": 4}}
NORM = (nn.BatchNorm2d, nn.GroupNorm)


def count(model):
    return sum(p.numel() for p in model.parameters())


def small(name, shape=(3, 32, 32), outputs=10, **params):
    if name == "text":
        params.setdefault("vocabulary", 30)
        shape = (7,)
    return make_model(name, shape, outputs, **SMALL.get(name, {}), **params)


def batch_for(name, size=2, shape=(3, 32, 32)):
    if name == "text":
        return torch.randint(1, 30, (size, 7))
    return torch.randn(size, *shape)


# Weights and biases of a layer, in the way one writes them on paper.
def dense(inputs, outputs):
    return inputs * outputs + outputs


def conv(inputs, outputs, kernel):
    return inputs * outputs * kernel * kernel + outputs


def normed(inputs, outputs, kernel=3):
    return inputs * outputs * kernel * kernel + 2 * outputs  # no bias; the norm's scale and shift


BASIC18 = (
    normed(3, 64)
    + 4 * normed(64, 64)
    + (normed(64, 128) + normed(128, 128) + normed(64, 128, 1) + 2 * normed(128, 128))
    + (normed(128, 256) + normed(256, 256) + normed(128, 256, 1) + 2 * normed(256, 256))
    + (normed(256, 512) + normed(512, 512) + normed(256, 512, 1) + 2 * normed(512, 512))
    + dense(512, 10)
)
PLAIN9 = (
    normed(3, 64)
    + normed(64, 128)
    + 2 * normed(128, 128)
    + normed(128, 256)
    + normed(256, 512)
    + 2 * normed(512, 512)
    + dense(512, 10)
)
VGG = (
    (normed(3, 64) + normed(64, 64))
    + (normed(64, 128) + normed(128, 128))
    + (normed(128, 256) + 2 * normed(256, 256))
    + (normed(256, 512) + 2 * normed(512, 512))
    + 3 * normed(512, 512)
    + (2 * dense(512, 512) + dense(512, 10))
)
LENET_TAIL = dense(120, 84) + dense(84, 10)
LENET_COLOUR = conv(3, 6, 5) + conv(6, 16, 5) + dense(16 * 5 * 5, 120) + LENET_TAIL
LENET_GREY = conv(1, 6, 5) + conv(6, 16, 5)


@pytest.mark.parametrize(
    ("name", "shape", "params", "by_sum", "stated"),
    [
        ("logistic", (1, 28, 28), {}, dense(784, 10), 7_850),
        ("logistic", (12,), {}, 12 * 10 + 10, 130),
        ("mlp", (1, 28, 28), {}, dense(784, 64) + dense(64, 10), 50_890),
        ("mlp", (4,), {"hidden": [8, 6]}, (32 + 8) + (48 + 6) + (60 + 10), 164),
        ("mlp", (4,), {"hidden": ()}, 4 * 10 + 10, 50),
        ("lenet5", (3, 32, 32), {}, LENET_COLOUR, 62_006),
        ("lenet5", (1, 28, 28), {}, LENET_GREY + dense(16 * 5 * 5, 120) + LENET_TAIL, 61_706),
        ("lenet5", (1, 8, 8), {}, LENET_GREY + dense(16 * 2 * 2, 120) + LENET_TAIL, 21_386),
        ("cnn5", (3, 32, 32), {}, LENET_COLOUR, 62_006),
        ("cnn5", (1, 28, 28), {}, LENET_GREY + dense(16 * 4 * 4, 120) + LENET_TAIL, 44_426),
        (
            "cnn5",
            (1, 28, 28),
            {"channels": [2, 3], "hidden": [5, 4]},
            (25 * 2 + 2) + (2 * 25 * 3 + 3) + (3 * 4 * 4 * 5 + 5) + (20 + 4) + (40 + 10),
            524,
        ),
        (
            "cnn",
            (3, 32, 32),  # 32 -> 30 -> 15 -> 13 -> 6
            {},
            conv(3, 32, 3) + conv(32, 64, 3) + dense(64 * 6 * 6, 512) + dense(512, 10),
            1_204_682,
        ),
        ("resnet9", (3, 32, 32), {}, PLAIN9, 6_573_130),
        ("resnet9", (3, 32, 32), {"norm": "group"}, PLAIN9, 6_573_130),
        ("resnet18", (3, 32, 32), {}, BASIC18, 11_173_962),
        ("vgg16", (3, 32, 32), {}, VGG, 15_249_354),
        (
            "text",
            (20,),
            {"vocabulary": 10_000},
            10_000 * 64 + dense(64, 64) + dense(64, 10),
            644_810,
        ),
        ("text", (20,), {"vocabulary": 7, "dim": 3, "hidden": 5}, 21 + (15 + 5) + (50 + 10), 101),
    ],
)
def test_parameter_counts(name, shape, params, by_sum, stated):
    assert by_sum == stated
    with torch.device("meta"):  # counts need no memory and no random numbers
        model = make_model(name, shape, 10, **params)
    assert count(model) == stated


@pytest.mark.parametrize("name", MODELS)
def test_docstrings_state_the_true_count_and_a_reference(name):
    doc = " ".join(inspect.getdoc(MODELS[name]).split())
    assert re.search(r"References?: \w+.* (19|20)\d\d", doc)
    if name == "text":
        stated = re.search(r"([\d,]+) parameters with a vocabulary of 10,000 and 2 outputs", doc)
        shape, outputs, params = (9,), 2, {"vocabulary": 10_000}
    else:
        stated = re.search(r"([\d,]+) parameters on \(([\d, ]+)\) with (\d+) outputs", doc)
        shape, outputs, params = map(int, stated[2].split(",")), int(stated[3]), {}
    with torch.device("meta"):
        model = make_model(name, tuple(shape), outputs, **params)
    assert count(model) == int(stated[1].replace(",", ""))


# More shapes: test_one_sample_is_enough_to_train_on.
@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 9, 13)])
@pytest.mark.parametrize("name", ["logistic", "mlp", *IMAGE_MODELS])
def test_images_in_outputs_out(name, shape):
    model = small(name, shape, 7)
    model.eval()
    assert model(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_tables_in_outputs_out(name):
    assert make_model(name, (13,), 3)(torch.randn(5, 13)).shape == (5, 3)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (1, 4, 4)])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_one_sample_is_enough_to_train_on(name, shape):
    # A client's last batch may hold one sample; batch norm refuses one value per channel.
    model = small(name, shape, 7).train()
    outputs = model(torch.randn(1, *shape))
    assert outputs.shape == (1, 7)
    outputs.sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("lenet5", (1, 28, 28), [(28, 28), (10, 10)]),
        ("lenet5", (3, 32, 32), [(28, 28), (10, 10)]),
        ("lenet5", (1, 8, 8), [(8, 8), (4, 4)]),
        ("cnn5", (1, 28, 28), [(24, 24), (8, 8)]),
        ("cnn", (3, 32, 32), [(30, 30), (13, 13)]),
        ("cnn", (1, 8, 8), [(8, 8), (4, 4)]),
        ("resnet9", (3, 32, 32), [(32, 32), (32, 32), (16, 16), (8, 8)]),
        ("vgg16", (3, 32, 32), [(n, n) for n in (32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2)]),
    ],
)
def test_what_each_convolution_puts_out(name, shape, sizes):
    model, seen = small(name, shape).eval(), []
    for child in model.children():
        if isinstance(child, nn.Conv2d):
            child.register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape[-2:])))
    model(torch.randn(1, *shape))
    assert seen == sizes


def test_resnet18_halves_three_times():
    model, seen = small("resnet18").eval(), []
    for name, child in model.named_children():
        if name.startswith("block"):
            child.register_forward_hook(lambda _m, _i, out: seen.append(out.shape[-1]))
    model(torch.randn(1, 3, 32, 32))
    assert seen == [32, 32, 16, 16, 8, 8, 4, 4]


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layer_is_called_head(name):
    model = small(name)
    linears = [key for key, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert linears[-1] == "head"
    assert list(model.named_parameters())[-1][0] == "head.bias"
    assert model.get_submodule("head").out_features == 10


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("logistic", ["head"]),
        ("mlp", ["hidden1", "head"]),
        ("lenet5", ["conv1", "conv2", "fc1", "fc2", "head"]),
        ("cnn5", ["conv1", "conv2", "fc1", "fc2", "head"]),
        ("cnn", ["conv1", "conv2", "fc1", "head"]),
        ("text", ["embedding", "hidden", "head"]),
        ("vgg16", [*(f"conv{i}" for i in range(1, 14)), "fc1", "fc2", "head"]),
        (
            "resnet9",
            [
                *("conv1", "conv2", "block1.conv1", "block1.conv2"),
                *("conv3", "conv4", "block2.conv1", "block2.conv2", "head"),
            ],
        ),
    ],
)
def test_layers_have_the_names_people_use(name, names):
    layers = (nn.Linear, nn.Conv2d, nn.Embedding)
    assert [k for k, m in small(name).named_modules() if isinstance(m, layers)] == names


@pytest.mark.parametrize("kind", ["batch", "group"])
@pytest.mark.parametrize(("name", "convs"), [("resnet9", 8), ("resnet18", 20), ("vgg16", 13)])
def test_each_norm_is_registered_right_after_its_convolution(name, convs, kind):
    model = small(name, norm=kind)
    leaves = [m for m in model.modules() if not list(m.children())]
    after = [b for a, b in itertools.pairwise(leaves) if isinstance(a, nn.Conv2d)]
    conv_widths = [m.out_channels for m in leaves if isinstance(m, nn.Conv2d)]
    expected = nn.BatchNorm2d if kind == "batch" else nn.GroupNorm
    assert len(after) == convs
    assert all(type(m) is expected for m in after)
    assert [m.weight.numel() for m in after] == conv_widths
    assert sum(isinstance(m, NORM) for m in leaves) == convs
    # State-dict order too: nothing stands between a convolution and its norm.
    keys = [key.rsplit(".", 1)[0] for key, _ in model.named_parameters()]
    for i, key in enumerate(keys):
        if model.get_submodule(key).__class__ in NORM:
            before = [k for k in keys[:i] if k != key][-1]
            assert isinstance(model.get_submodule(before), nn.Conv2d)


@pytest.mark.parametrize("name", NORMED)
def test_group_norm_leaves_no_buffers(name):
    assert not list(small(name, norm="group").buffers())
    assert list(small(name, norm="batch").buffers())


@pytest.mark.parametrize("width", [4, 11, 16, 64])
def test_group_norm_suits_any_width(width):
    with torch.device("meta"):
        model = make_model("resnet9", (3, 32, 32), 10, width=width, norm="group")
    for m in model.modules():
        if isinstance(m, nn.GroupNorm):
            assert m.num_channels // m.num_groups >= min(16, m.num_channels)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights(name):
    torch.manual_seed(3)
    first = small(name).state_dict()
    torch.manual_seed(3)
    again = small(name).state_dict()
    torch.manual_seed(4)
    other = small(name).state_dict()
    assert first.keys() == again.keys()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_weights_start_as_torch_starts_them():
    torch.manual_seed(5)
    model = make_model("lenet5", (3, 32, 32), 10)
    torch.manual_seed(5)
    plain = [nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)]
    plain += [nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)]
    for ours, theirs in zip(
        model.parameters(), [p for m in plain for p in m.parameters()], strict=True
    ):
        assert torch.equal(ours, theirs)


def test_lenet5_is_the_textbook_function():
    torch.manual_seed(0)
    model = make_model("lenet5", (1, 28, 28), 10)
    w = dict(model.named_parameters())
    x = torch.randn(4, 1, 28, 28)
    h = F.conv2d(F.pad(x, (2, 2, 2, 2)), w["conv1.weight"], w["conv1.bias"])
    h = F.max_pool2d(F.relu(h), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, w["conv2.weight"], w["conv2.bias"])), 2).flatten(1)
    h = F.relu(h @ w["fc1.weight"].T + w["fc1.bias"])
    h = F.relu(h @ w["fc2.weight"].T + w["fc2.bias"])
    torch.testing.assert_close(model(x), h @ w["head.weight"].T + w["head.bias"])


def test_mlp_and_cnn_are_the_textbook_functions():
    torch.manual_seed(0)
    model, x = make_model("mlp", (1, 4, 4), 3, hidden=(8, 6)), torch.randn(5, 1, 4, 4)
    h = F.relu(model.hidden2(F.relu(model.hidden1(x.flatten(1)))))
    torch.testing.assert_close(model(x), model.head(h))
    model, x = make_model("cnn", (1, 28, 28), 3).eval(), torch.randn(2, 1, 28, 28)
    h = F.max_pool2d(F.relu(model.conv1(x)), 2)
    h = F.max_pool2d(F.relu(model.conv2(h)), 2)
    torch.testing.assert_close(model(x), model.head(F.relu(model.fc1(h.flatten(1)))))


@pytest.mark.parametrize(("name", "blocks"), [("resnet9", 2), ("resnet18", 8), ("vgg16", 0)])
def test_deep_models_end_in_relu_and_pooling_over_all_pixels(name, blocks):
    torch.manual_seed(0)
    model, x = small(name, (3, 64, 64)).eval(), torch.randn(2, 3, 64, 64)
    layers = dict(model.named_children())
    assert sum(key.startswith("block") for key in layers) == blocks
    h = x
    for key, layer in layers.items():  # once more, as the papers order it: ReLU, then pooling
        if key in ("mean", "maximum"):
            break
        if isinstance(layer, nn.MaxPool2d):
            h = F.max_pool2d(F.relu(h), 2)
        else:
            h = F.relu(layer(h)) if key.startswith("norm") else layer(h)
    assert h.min() >= 0
    h = h.amax((2, 3)) if name == "resnet9" else h.mean((2, 3))
    if name == "vgg16":
        h = F.relu(model.fc2(F.relu(model.fc1(h))))
    torch.testing.assert_close(model(x), model.head(h))


def test_resnet_blocks_are_the_published_functions():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 6)
    plain = make_model("resnet9", (3, 32, 32), 10, width=4).block1
    inner = F.relu(plain.norm1(plain.conv1(x)))
    torch.testing.assert_close(plain(x), x + F.relu(plain.norm2(plain.conv2(inner))))
    net = make_model("resnet18", (3, 32, 32), 10, width=8)
    same, down = net.block1, net.block3
    inner = same.norm2(same.conv2(F.relu(same.norm1(same.conv1(x)))))
    torch.testing.assert_close(same(x), F.relu(inner + x))
    inner = down.norm2(down.conv2(F.relu(down.norm1(down.conv1(x)))))
    assert inner.shape == (2, 16, 3, 3)
    torch.testing.assert_close(down(x), F.relu(inner + down.shortcut_norm(down.shortcut(x))))


@pytest.mark.parametrize("name", MODELS)
def test_in_place_steps_leave_gradients_and_inputs_right(name, monkeypatch):
    # The same model with every in-place ReLU made out-of-place must have the same gradients.
    torch.manual_seed(0)
    model = small(name)
    model.eval()  # no dropout
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.train()
    twin = copy.deepcopy(model)
    x = batch_for(name)
    kept = x.clone()
    model(x).square().sum().backward()
    assert torch.equal(x, kept)
    for m in twin.modules():
        if isinstance(m, nn.ReLU):
            m.inplace = False
    monkeypatch.setattr(F, "relu_", F.relu)
    twin(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert any(p.grad.abs().sum() > 0 for p in model.parameters())


def rates(model):
    return [m.p for m in model.modules() if isinstance(m, nn.Dropout)]


def test_dropout_is_a_module_only_where_there_is_some():
    assert rates(small("cnn")) == [0.25, 0.5]
    assert rates(small("cnn", dropout=[0.1, 0.2])) == [0.1, 0.2]
    assert rates(small("cnn", dropout=0.3)) == [0.3, 0.3]
    assert rates(small("cnn", dropout=0)) == []
    assert rates(small("mlp")) == []
    assert rates(small("mlp", hidden=(4, 4), dropout=0.5)) == [0.5, 0.5]
    assert rates(small("vgg16")) == [0.5, 0.5]
    torch.manual_seed(0)
    model, x = small("cnn"), torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_text_averages_over_real_tokens_only():
    torch.manual_seed(0)
    model = make_model("text", (5,), 3, vocabulary=10, dim=4, hidden=6)
    with torch.no_grad():
        model.embedding.weight[0] = 100.0  # as noise might leave it
    e = model.embedding.weight
    ids = torch.tensor([[2, 7, 0, 0, 0], [4, 0, 4, 9, 0]])
    mean = torch.stack([(e[2] + e[7]) / 2, (2 * e[4] + e[9]) / 3])
    torch.testing.assert_close(model(ids), model.head(F.relu(model.hidden(mean))))
    longer = F.pad(ids, (0, 3))
    torch.testing.assert_close(model(ids), model(longer))


def test_text_of_padding_only_is_finite_and_teaches_padding_nothing():
    model = make_model("text", (3,), 2, vocabulary=5, dim=4)
    assert model.embedding.weight[0].abs().sum() == 0
    ids = torch.tensor([[0, 0, 0], [1, 0, 0]])
    out = model(ids)
    assert torch.isfinite(out).all()
    out.square().sum().backward()
    assert model.embedding.weight.grad[0].abs().sum() == 0
    assert model.embedding.weight.grad[1].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "shape", "params", "says"),
    [
        ("lenet", (1, 28, 28), {}, "unknown model 'lenet'; did you mean 'lenet5'"),
        ("mlp", (4,), {"hiden": (3,)}, "'hiden'; did you mean 'hidden'.*dropout, hidden"),
        ("resnet9", (3, 32, 32), {"widht": 8}, "'widht'; did you mean 'width'"),
        ("mlp", (4,), {"shape_": 1}, "unknown parameter of model 'mlp'"),
        ("lenet5", (1, 28, 28), {"width": 8}, "'lenet5' takes no parameters.*'width'"),
        ("text", (5,), {}, "'text' needs the parameter 'vocabulary'"),
        ("text", (5,), {"vocabulary": 1}, "vocabulary must be a whole number of 2"),
        ("text", (1, 8, 8), {"vocabulary": 9}, r"takes token ids \(length,\), not .*\(1, 8, 8\)"),
        ("mlp", (), {}, "takes tables .* and images"),
        ("mlp", (4,), {"hidden": 64}, "hidden must be a list of whole numbers, not 64"),
        ("mlp", (4,), {"hidden": [0]}, "each of hidden must be .* not 0"),
        ("mlp", (4,), {"dropout": 1.0}, "dropout must be at least 0 and less than 1, not 1.0"),
        ("cnn", (1, 8, 8), {"dropout": [0.1]}, "dropout must be one rate or two"),
        ("cnn", (1, 8, 8), {"dropout": -0.1}, "dropout must be at least 0"),
        ("cnn5", (1, 8, 8), {"channels": [1, 2, 3]}, "channels must have 2 numbers, not 3"),
        ("resnet18", (3, 32, 32), {"norm": "bach"}, "unknown norm 'bach'; did you mean 'batch'"),
        ("resnet9", (3, 32, 32), {"width": 0}, "width must be a whole number of 1 or more"),
        ("vgg16", (3, 32, 32), {"width": 2.5}, "width must be a whole number of 1 or more"),
    ],
)
def test_wrong_names_and_values_are_refused(name, shape, params, says):
    with pytest.raises(ConfigError, match=says):
        make_model(name, shape, 10, **params)


@pytest.mark.parametrize("shape", [(30,), (28, 28), (1, 3, 8), (1, 8, 3), (0, 8, 8), (1, 1, 8, 8)])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_models_say_which_shapes_they_take(name, shape):
    says = rf"{name} takes images \(channels, height, width\) of at least 4x4 pixels, not"
    with pytest.raises(ConfigError, match=says):
        make_model(name, shape, 10)


@pytest.mark.parametrize("outputs", [0, -1, 2.0, True])
def test_outputs_must_be_a_whole_number(outputs):
    with pytest.raises(ConfigError, match="outputs must be a whole number"):
        make_model("logistic", (4,), outputs)
