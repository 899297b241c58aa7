"""User-centric aggregation: rows of weights, streams and cohorts, against numbers by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_score

import coterie
from coterie.client import Client
from coterie.clustering import kmeans
from coterie.core.messages import Upload
from coterie.core.method import Round
from coterie.errors import ConfigError, TrainingError
from scripted import Scripted, Spy, halves, linears, opened, setup, steps, weights
from support import digits, drive, experiment, models, on_quadratics, quadratics, with_groups

TWO = linears((1, 1))  # a weight and a bias
START = weights(TWO, 0, 0)

# Gradients (0, 0), (1, 0), (0, 2) with σ 1, 2, 1 and 10, 20, 30 samples.
# ‖g0 − g1‖² = 1 over 2·1·2: 0.25. ‖g0 − g2‖² = 4 over 2·1·1: 2. ‖g1 − g2‖² = 5 over 2·2·1: 1.25.
# Row 0 ∝ 1, 2·e^−0.25, 3·e^−2 = 1, 1.5576, 0.4060; row 1 ∝ e^−0.25/2, 1, 1.5·e^−1.25 = 0.3894, 1,
# 0.4298; row 2 ∝ e^−2/3, 2/3·e^−1.25, 1 = 0.0451, 0.1910, 1.
GRADIENTS = {0: (0, 0), 1: (1, 0), 2: (0, 2)}
VARIANCES = {0: 1.0, 1: 4.0, 2: 1.0}
SAMPLES = {0: 10, 1: 20, 2: 30}
ROWS = np.array(
    [
        [0.337426, 0.525577, 0.136997],
        [0.214056, 0.549705, 0.236240],
        [0.036495, 0.154519, 0.808986],
    ]
)


def told(gradients=None, variances=None, samples=None, sent=None):
    """Clients that report these gradients and send these models."""
    gradients = GRADIENTS if gradients is None else gradients
    variances = VARIANCES if variances is None else variances

    def answer(order):
        if order.task == "gradient":
            numbers = gradients.get(order.client)
            metrics = {"variance": variances.get(order.client, 1.0)}
            return numbers and Upload({"gradient": weights(TWO, *numbers)}, metrics)
        model = sent.get(order.client)
        return model and Upload({"model": weights(TWO, *model)}, {"loss": 0.0})

    return Scripted(answer, range(len(gradients)), SAMPLES if samples is None else samples)


def start(fed, **parameters):
    method = coterie.user_centric(**parameters)
    return method, method.init(fed, setup(START, sorted(fed.clients)))


def mixing(state):
    return state.memory["mixing"].numpy()


# --- rows ----------------------------------------------------------------------------------------


def test_rows_by_hand():
    _, state = start(told())
    assert np.allclose(mixing(state), ROWS, atol=1e-6)
    assert np.allclose(np.array(state.notes["mixing"]), ROWS, atol=1e-5)
    assert np.allclose(mixing(state).sum(axis=1), 1.0, atol=1e-12)
    assert state.groups == {0: 0, 1: 1, 2: 2}


def test_terms_of_the_bound_by_hand():
    # Of row 0: 1/(0.337426²/10 + 0.525577²/20 + 0.136997²/30), and 0.525577·1 + 0.136997·4; with
    # FedAvg's weights 1/6, 2/6, 3/6: (2·1 + 3·4)/6, (1·1 + 3·5)/6, (1·4 + 2·5)/6.
    _, state = start(told())
    terms = state.notes["mixing_terms"]
    assert terms["clients"] == [0, 1, 2]
    assert terms["samples"] == [10, 20, 30]
    assert terms["effective"][0] == pytest.approx(38.7254, rel=1e-4)
    assert terms["discrepancy"][0] == pytest.approx(1.073565, rel=1e-4)
    assert terms["together"] == pytest.approx([14 / 6, 16 / 6, 14 / 6], rel=1e-5)
    assert "stream_effective" not in terms  # everybody has its own stream


def test_clients_of_one_stream_have_the_terms_of_its_row():
    _, state = start(told(), streams=1)
    terms, row = state.notes["mixing_terms"], ROWS.mean(axis=0)
    worth = 1 / (row**2 / [10, 20, 30]).sum()
    assert terms["stream_effective"] == pytest.approx([worth] * 3, rel=1e-4)
    gaps = np.array([[0, 1, 4], [1, 0, 5], [4, 5, 0]])
    assert terms["stream_discrepancy"] == pytest.approx(gaps @ row, rel=1e-4)
    assert terms["effective"][0] == pytest.approx(38.7254, rel=1e-4)  # its own row's, as before


def test_clients_far_apart_have_the_terms_of_learning_alone():
    _, state = start(told({c: (100 * c, 0) for c in range(3)}, {}))
    terms = state.notes["mixing_terms"]
    assert (terms["effective"], terms["discrepancy"]) == ([10, 20, 30], [0, 0, 0])
    _, state = start(told(dict.fromkeys(range(3), (1, 2)), {}))
    assert state.notes["mixing_terms"]["effective"] == pytest.approx([60] * 3, rel=1e-5)


def test_rows_have_the_weights_of_the_rule():
    # w_ij/w_ii = (n_j/n_i)·exp(−‖g_i − g_j‖²/(2σ_iσ_j)), in a federation drawn at random.
    rng = np.random.default_rng(0)
    g = {c: tuple(rng.normal(size=2)) for c in range(5)}
    v, n = {c: float(rng.uniform(0.5, 3)) for c in g}, {c: int(rng.integers(1, 99)) for c in g}
    _, state = start(told(g, v, n))
    for i in g:
        for j in g:
            gap = sum((a - b) ** 2 for a, b in zip(g[i], g[j], strict=True))
            wanted = n[j] / n[i] * math.exp(-gap / (2 * math.sqrt(v[i]) * math.sqrt(v[j])))
            found = mixing(state)[i, j] / mixing(state)[i, i]
            assert found == pytest.approx(wanted, rel=1e-5)


def test_gradients_far_apart_give_the_identity():
    _, state = start(told({c: (100 * c, 0) for c in range(4)}, {}))
    assert np.array_equal(mixing(state), np.eye(4))


def test_equal_gradients_give_shares_of_samples():
    _, state = start(told(dict.fromkeys(range(3), (1, 1)), {}))
    assert np.allclose(mixing(state), [[1 / 6, 2 / 6, 3 / 6]] * 3)


def test_a_deviation_of_zero_is_floored():
    # One client without deviation among three of 1: floored at 0.001 of the mean, 0.00075.
    # Over 2·0.00075·1 a squared distance of 0.0015 gives exp(−1) = 0.3679 of its own weight.
    g = {0: (0, 0), 1: (math.sqrt(0.0015), 0), 2: (50, 0), 3: (0, 50)}
    _, state = start(told(g, {0: 0.0, 1: 1.0, 2: 1.0, 3: 1.0}, {}))
    assert mixing(state)[0, 1] / mixing(state)[0, 0] == pytest.approx(math.exp(-1), rel=1e-4)
    _, state = start(told(dict.fromkeys(range(3), (0, 0)), dict.fromkeys(range(3), 0.0)))
    assert np.allclose(mixing(state), [[1 / 6, 2 / 6, 3 / 6]] * 3)
    apart = {0: (0, 0), 1: (1, 0), 2: (0, 2)}
    _, state = start(told(apart, dict.fromkeys(range(3), 0.0)))
    assert np.array_equal(mixing(state), np.eye(3))


# --- what clients tell ---------------------------------------------------------------------------


def probed(targets, folder, **parameters):
    """What each client with a quadratic loss sends at θ⁰ = 0: gradient and variance."""
    made = on_quadratics(coterie.user_centric(**parameters), targets)
    channel, engine, plan = opened(made, folder)
    channel.begin(0, stage="init")
    made.method.init(channel, made.setup(plan.start))
    return [
        (float(s.sent["gradient"].vector), s.metrics["variance"])
        for _, s in sorted(engine.of("init.0").items())
    ]


def test_gradients_and_deviations_by_hand(tmp_path):
    # The gradient of the mean of (θ − y)² at 0 is −2ȳ. One sample a batch: (1, 1, 5, 5) has −6 and
    # batches −2, −2, −10, −10: σ² = 16. (1, 3): −4, batches −2 and −6: σ² = 4. Alike: 0.
    targets = [[1.0, 1.0, 5.0, 5.0], [1.0, 3.0], [7.0] * 5, [2.0]]
    assert probed(targets, tmp_path, variance_batch=1) == [
        (-6, 16), (-4, 4), (-14, 0), (-4, 0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "counts"),
    [(None, [3, 3, 2, 1]), (4, [3, 2, 2, 1]), (100, [2, 2, 2, 1]), (3, [4, 2, 2, 1])],
)
def test_batches_of_the_deviation(asked, counts, tmp_path, monkeypatch):
    # Thirds unless told otherwise; never fewer than two, nor more than there are samples.
    targets = [[1.0] * 12, [1.0] * 7, [1.0] * 2, [1.0]]
    parameters = {} if asked is None else {"variance_batch": asked}
    gradient, batches = Client.gradient, dict.fromkeys(range(4), 0)

    def counted(client, model, rows=None):
        batches[client.id] += rows is not None
        return gradient(client, model, rows)

    monkeypatch.setattr(Client, "gradient", counted)
    probed(targets, tmp_path, **parameters)
    assert list(batches.values()) == counts


def test_batches_have_an_equal_share_and_every_sample_once(tmp_path):
    # Twelve samples in two batches of six: whatever the order, their gradients lie at equal
    # distances on both sides of the whole; with 1, 2, 4, ... no two orders give the same.
    targets = [[2.0**i for i in range(12)]]
    ((gradient, variance),) = probed(targets, tmp_path, variance_batch=6)
    gap = math.sqrt(variance)
    half = (-gradient - gap) / 2 * 6  # the sum of one batch's targets
    assert bin(round(half)).count("1") == 6
    assert abs(half - round(half)) < 1e-2


def test_what_a_client_tells_does_not_depend_on_when_it_is_asked(tmp_path):
    targets = [[2.0**i for i in range(12)]] * 3
    made = on_quadratics(coterie.user_centric(variance_batch=6), targets)
    channel, engine, plan = opened(made, tmp_path)
    tells = []
    for number in (0, 1, 5):
        channel.begin(number, stage=f"at{number}")
        made.method.init(channel, made.setup(plan.start))
        tells.append([s.metrics["variance"] for s in engine.of(f"at{number}.0").values()])
    assert tells[0] == tells[1] == tells[2]
    assert len(set(tells[0])) == 3  # each has batches of its own


# --- rounds --------------------------------------------------------------------------------------

SENT = {0: (1, 10), 1: (2, 20), 2: (4, 40)}


def numbers(state):
    return {s: m.vector.tolist() for s, m in state.models.items()}


def test_every_model_is_its_own_mixture_of_all():
    fed = told(sent=SENT)
    method, state = start(fed)
    state = method.round(fed, state, Round(0, [0, 1, 2]))
    for client, row in enumerate(ROWS):
        mixed = float(row @ [1, 2, 4])  # weighted by the row alone: samples are in it already
        assert numbers(state)[client] == pytest.approx([mixed, 10 * mixed], rel=1e-5)
        assert method.sends(state, client)[str(client)].vector.tolist() == numbers(state)[client]


def test_rows_are_renormalised_over_the_cohort_and_the_others_keep_their_model():
    fed = told(sent=SENT)
    method, state = start(fed)
    state = method.round(fed, state, Round(0, [0, 2]))
    # (0.337426·1 + 0.136997·4)/(0.337426 + 0.136997) = 0.885414/0.474423 = 1.86630 and
    # (0.036495·1 + 0.808986·4)/(0.036495 + 0.808986) = 3.272439/0.845481 = 3.87050.
    assert numbers(state)[0] == pytest.approx([1.86630, 18.6630], rel=1e-5)
    assert numbers(state)[2] == pytest.approx([3.87050, 38.7050], rel=1e-5)
    assert numbers(state)[1] == [0, 0]
    # And over those who answered: client 2's reply is lost, client 0 is left to itself.
    again = method.round(told(sent={0: (1, 10)}), state, Round(1, [0, 2]))
    assert numbers(again) == {0: [1, 10], 1: [0, 0], 2: numbers(state)[2]}
    assert numbers(method.round(told(sent={}), state, Round(1, [0, 2]))) == numbers(state)


def test_clients_of_a_stream_share_the_mean_row():
    fed = told(sent=SENT)
    method, state = start(fed, streams=2)
    # Rows 0 and 1 are the nearest to each other: 0.16 apart, and 0.8 from row 2.
    assert state.groups == {0: 0, 1: 0, 2: 1}
    wanted = [ROWS[:2].mean(0), ROWS[2]]  # (0.275741, 0.537641, 0.186618)
    assert np.allclose(mixing(state), wanted, atol=1e-6)
    state = method.round(fed, state, Round(0, [0, 1, 2]))
    # 0.275741 + 2·0.537641 + 4·0.186618 = 2.097495; 0.036495 + 0.309038 + 3.235944 = 3.581477.
    assert numbers(state) == {
        0: pytest.approx([2.097495, 20.97495], rel=1e-5),
        1: pytest.approx([3.581477, 35.81477], rel=1e-5),
    }
    ((_, orders, _),) = fed.asked[1:]
    assert {c: list(o.arrays) for c, o in orders.items()} == {0: ["0"], 1: ["0"], 2: ["1"]}


def test_in_parallel_every_client_trains_every_stream():
    fed = told(sent=SENT)
    method, state = start(fed, streams=2, parallel=True)
    state = method.round(fed, state, Round(0, [0, 1, 2]))
    first, second = fed.asked[1:]
    for (_, orders, into), slot in ((first, 0), (second, 1)):
        assert [list(orders[c].arrays) for c in range(3)] == [[str(slot)]] * 3
        assert [list(into[c]) for c in range(3)] == [[slot]] * 3
    assert numbers(state)[0] == pytest.approx([2.097495, 20.97495], rel=1e-5)


def test_in_parallel_it_costs_as_many_uploads_as_streams(tmp_path):
    payloads = {}
    for parallel in (False, True):
        method = coterie.user_centric(streams=3, parallel=parallel)
        made = experiment(method, settings={"rounds": 1})
        _, _, engine = drive(made, tmp_path / str(parallel), Spy)
        train = [s for s in engine.seen if s.task == "train"]
        payloads[parallel] = [sum(s.payload[i] for s in train) for i in (0, 1)]
    one = 6 * 4 * 910  # six clients, 910 numbers
    assert payloads == {False: [one, one], True: [3 * one, 3 * one]}


def test_the_gradient_is_sent_once_and_nothing_else_of_a_single_client(tmp_path):
    made = experiment(coterie.user_centric(), settings={"rounds": 2})
    _, _, engine = drive(made, tmp_path, Spy)
    whole = made.plan(tmp_path).start.layout.names
    assert {(s.order, *s.up) for s in engine.seen} == {
        ("init.0", "gradient"), ("1.0", "model"), ("2.0", "model")
    }  # fmt: skip
    for seen in engine.of("init.0").values():
        assert (seen.down, seen.up) == ({"model": whole}, {"gradient": whole})
        assert set(seen.metrics) == {"variance"}


# --- streams by themselves -----------------------------------------------------------------------


def test_auto_finds_planted_groups():
    # Eight clients in four places 10 apart, hardly different inside.
    places = [(0, 0), (10, 0), (0, 10), (10, 10)]
    g = {c: (places[c % 4][0] + c / 100, places[c % 4][1]) for c in range(8)}
    for parameters in ({"select": "silhouette"}, {"probe": "gradient"}):
        _, state = start(told(g, {}, {}), streams="auto", **parameters)
        assert state.groups == {c: c % 4 for c in range(8)}
        assert state.notes["streams"] == 4
        assert "evidence" not in state.notes


def test_without_any_noise_every_difference_is_real():
    g = {c: (c % 2, 0) for c in range(6)}
    _, state = start(told(g, dict.fromkeys(g, 0.0), {}), streams="auto", select="silhouette")
    assert state.notes["streams"] == 2
    assert state.groups == {c: c % 2 for c in range(6)}


# Directions of 0° and 90°, with a few degrees between the halves of a client. A half of length 1 is
# 2·sin(gap/2) from the other, and each a half of that from their mean.
ANGLES = {0: (0, 10), 1: (90, 96), 2: (2, 0), 3: (92, 84)}


def turned(angles=ANGLES, validation=1, sent=None, samples=None):
    """Clients whose two short trainings go in these directions."""

    def answer(order):
        if order.task == "steps":
            return steps(25)
        if order.task == "halves":
            gone = angles.get(order.client)
            radians = [math.radians(a) for a in gone or ()]
            sides = [weights(TWO, math.cos(a), math.sin(a)) for a in radians]
            return gone and halves(*sides, validation=validation)
        return Upload({"model": weights(TWO, *sent[order.client])}, {"loss": 0.0})

    return Scripted(answer, range(len(angles)), samples or {})


def test_auto_is_the_groups_of_the_evidence():
    _, state = start(turned(), streams="auto", trial="off")
    assert state.groups == {0: "0/0", 1: "0/1", 2: "0/0", 3: "0/1"}
    assert state.notes["streams"] == state.notes["evidence"]["groups"] == 2
    assert mixing(state).shape == (2, 4)
    odd = {c: (90 * c, 90 * c + 180) for c in range(4)}  # halves that contradict each other
    _, state = start(turned(odd), streams="auto", trial="off")
    assert state.groups == dict.fromkeys(range(4), 0)
    with pytest.raises(ConfigError, match=r"select = 'evidence' compares updates.*'update'"):
        coterie.user_centric(streams="auto", select="evidence", probe="gradient")


def test_auto_is_one_stream_until_the_trial():
    fed = turned(sent={c: (c, 1) for c in range(4)})
    method, state = start(fed, streams="auto")
    assert state.groups == dict.fromkeys(range(4), 0)
    assert state.memory["trial"]["clients"] == [0, 1, 2, 3]
    assert mixing(state).shape == (1, 4)
    state = state.joined({}, trial={**state.memory["trial"], "next": 1})
    # One stream: the mean of everybody's row; with equal samples nobody is left out.
    state = method.round(fed, state, Round(0, range(4)))
    assert numbers(state)[0] == pytest.approx(mixing(state)[0] @ [[c, 1] for c in range(4)])


def test_weights_of_directions_by_hand():
    # Halves are 60°, 40°, 50° and 36° apart: they agree by the cosine ρ of that, their mean is
    # reliable by 2ρ/(1 + ρ), and deviates from either half by σ² = sin²(gap/2). Directions are at
    # 0°, 60°, 25° and 88°; cosines are divided by the root of both reliabilities, σ² by 4.
    wide = {0: (-30, 30), 1: (40, 80), 2: (0, 50), 3: (70, 106)}
    fed = turned(wide, samples={0: 1, 1: 2, 2: 3, 3: 4})
    _, state = start(fed, probe="update")
    gap, at, n = np.deg2rad([60, 40, 50, 36]), np.deg2rad([0, 60, 25, 88]), np.array([1, 2, 3, 4])
    reliable, sigma = 2 * np.cos(gap) / (1 + np.cos(gap)), np.sin(gap / 2) / 2
    wanted = np.zeros((4, 4))
    for i in range(4):
        for j in range(4):
            alike = min(1, np.cos(at[i] - at[j]) / math.sqrt(reliable[i] * reliable[j]))
            square = 0 if i == j else 2 - 2 * alike
            wanted[i, j] = n[j] * math.exp(-square / (2 * sigma[i] * sigma[j]))
    wanted /= wanted.sum(1, keepdims=True)
    assert np.allclose(mixing(state), wanted, atol=1e-6)
    assert ((wanted > 0.01) & (wanted < 0.5)).sum() > 4  # so the numbers say something
    assert state.groups == {c: c for c in range(4)}
    assert "own_group" not in state.notes  # everybody is a group
    _, state = start(turned(wide, samples={0: 1, 1: 2, 2: 3, 3: 4}), probe="update", streams=2)
    slots = np.array([state.groups[c] for c in range(4)])
    assert len(set(slots)) == 2
    shares = (wanted * (slots[:, None] == slots)).sum(1)
    assert state.notes["own_group"] == pytest.approx(shares.mean(), abs=1e-4)


def test_streams_by_evidence_share_the_mean_row_of_their_clients():
    _, state = start(turned(), streams="auto", trial="off")
    everybody = np.array(state.notes["mixing"])
    wanted = [everybody[[0, 2]].mean(0), everybody[[1, 3]].mean(0)]
    assert np.allclose(mixing(state), wanted, atol=1e-5)
    inside = (everybody[[0, 2]][:, [0, 2]].sum() + everybody[[1, 3]][:, [1, 3]].sum()) / 4
    assert state.notes["own_group"] == pytest.approx(inside, abs=1e-3)


@pytest.mark.parametrize("groups", [1, 2])
def test_auto_finds_the_groups_of_clients_that_really_train(groups, tmp_path):
    people = digits(clients=8, groups=groups, samples=640)
    method = coterie.user_centric(streams="auto", trial="off", steps=40)
    made = experiment(method, people)
    channel, _, plan = opened(made, tmp_path)
    state = method.init(channel, made.setup(plan.start))
    assert state.notes["streams"] == groups
    assert len({(state.groups[c], people.groups[c]) for c in range(8)}) == groups


def test_a_penalty_makes_streams_dear():
    places = [(0, 0), (10, 0), (0, 10), (10, 10)]
    g = {c: (places[c % 4][0] + c / 100, places[c % 4][1]) for c in range(8)}
    _, state = start(told(g, {}, {}), streams="auto", select="silhouette", penalty=0.5)
    assert state.notes["streams"] == 2


def test_streams_that_cannot_be():
    for streams in (0, -1):
        with pytest.raises(ConfigError, match=r"streams = .*: must be at least 1"):
            coterie.user_centric(streams=streams)
    with pytest.raises(ConfigError, match="streams = 4 groups for 3 clients"):
        coterie.user_centric(streams=4).check(setup(START, range(3)))
    with pytest.raises(ConfigError, match="variance_batch"):
        coterie.user_centric(variance_batch=0)
    with pytest.raises(TrainingError, match="no client sent its gradient"):
        start(told({0: None, 1: None}))


@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-9, 1e-7, 1e-3])
def test_clients_that_hardly_differ_share_streams_instead_of_failing(gap):
    g = {c: (1 + c * gap, 1) for c in range(4)}
    _, state = start(told(g, {}, {}), streams=3)
    assert 1 <= len(set(state.groups.values())) <= 3
    assert sorted(state.models) == sorted(set(state.groups.values()))


def test_one_client_and_two():
    paper = {"streams": "auto", "select": "silhouette"}
    for parameters in ({"streams": "all"}, paper, {"streams": 1}):
        _, state = start(told({0: (3, 4)}, {}, {}), **parameters)
        assert state.groups == {0: 0}
        assert mixing(state).tolist() == [[1.0]]
    _, state = start(turned({0: (3, 4)}), streams="auto")
    assert (state.groups, mixing(state).tolist()) == ({0: 0}, [[1.0]])
    _, state = start(told({0: (3, 4), 1: (100, 0)}, {}, {}), **paper)
    assert state.groups == {0: 0, 1: 0}  # two rows have no silhouette
    _, state = start(told({0: (3, 4), 1: (100, 0)}, {}, {}), streams=2)
    assert state.groups == {0: 0, 1: 1}


# --- the order of clients ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [{"streams": "all"}, {"streams": 2}, {"streams": "auto", "select": "silhouette"}],
    ids=["all", "two", "auto"],
)
def test_another_order_of_clients_only_relabels(parameters, tmp_path):
    rng = np.random.default_rng(2)
    targets = [(rng.normal(8 * (c % 2), 1, 4 + c)).tolist() for c in range(6)]
    turned = [4, 2, 5, 0, 3, 1]
    ends = []
    for name, order in (("a", range(6)), ("b", turned)):
        people = quadratics([targets[c] for c in order])
        made = on_quadratics(
            coterie.user_centric(**parameters, variance_batch=1), [], population=people
        )
        state, channel, _ = drive(made, tmp_path / name, rounds=3)
        ends.append((state, [float(m) for m in models(made, state, channel)]))
    (plain, ours), (other, theirs) = ends
    assert theirs == pytest.approx([ours[c] for c in turned], abs=1e-5)
    pairs = {(other.groups[i], plain.groups[c]) for i, c in enumerate(turned)}
    assert len(pairs) == len(set(plain.groups.values())) == len(set(other.groups.values()))


# --- newcomers -----------------------------------------------------------------------------------


def test_a_newcomer_has_a_row_of_its_own():
    gradients = dict(GRADIENTS)
    fed = told(gradients, {**VARIANCES, 3: 1.0}, {**SAMPLES, 3: 5}, SENT)
    method, state = start(fed)
    state = method.round(fed, state, Round(0, [0, 1, 2]))
    before = numbers(state)
    gradients[3] = (1, 1)
    state = method.admit(fed, state, Round(1, [3]))
    # Squared distances 2, 1, 2 over 2·1·1, 2·1·2, 2·1·1: weights 10·e^−1, 20·e^−0.25, 30·e^−1.
    row = np.array([10 * math.exp(-1), 20 * math.exp(-0.25), 30 * math.exp(-1)])
    mixed = row @ [before[c] for c in range(3)] / row.sum()
    assert state.groups[3] == 3
    assert numbers(state)[3] == pytest.approx(mixed.tolist(), rel=1e-5)
    assert {c: numbers(state)[c] for c in range(3)} == before
    # From now on it counts for the others and for itself: 5 samples.
    own = np.append(row, 5.0)
    assert np.allclose(mixing(state)[3], own / own.sum(), atol=1e-6)
    first = np.append(ROWS[0] * 2.963608, 0.5 * math.exp(-1))  # the sum of row 0 as it was
    assert np.allclose(mixing(state)[0], first / first.sum(), atol=1e-5)
    assert np.allclose(mixing(state).sum(axis=1), 1.0)


def test_a_newcomer_joins_the_stream_with_the_nearest_row():
    gradients = dict(GRADIENTS)
    fed = told(gradients, {}, {}, SENT)
    method, state = start(fed, streams=2)
    assert state.groups == {0: 0, 1: 0, 2: 1}
    gradients |= {3: (0.5, 0.1), 4: (0, 2.2), 5: None}
    found = method.admit(fed, state, Round(1, [3, 4, 5]))
    assert found.groups == {**state.groups, 3: 0, 4: 1}
    assert list(found.models) == list(state.models)
    assert mixing(found).shape == (2, 5)
    assert np.allclose(mixing(found).sum(axis=1), 1.0)


def test_a_newcomer_joins_the_stream_whose_mean_direction_is_nearest():
    angles = dict(ANGLES)
    fed = turned(angles)
    method, state = start(fed, streams="auto", trial="off")
    angles |= {4: (40, 30), 5: (50, 70), 6: None}
    found = method.admit(fed, state, Round(1, [4, 5, 6]))
    # Mean directions 3° and 90.5°: 35° is nearer to the first, 60° to the second.
    assert found.groups == {**state.groups, 4: "0/0", 5: "0/1"}
    assert {o.task for o in fed.asked[-1][1].values()} == {"halves"}
    assert mixing(found).shape == (2, 6)
    assert np.allclose(mixing(found).sum(axis=1), 1.0)


def test_the_scenarios_groups_are_never_looked_at(tmp_path):
    targets = [[1.0, 2.0], [1.5, 2.5], [9.0, 8.0]]
    runs = []
    for name, groups in (("a", [0, 1, 2]), ("b", [0, 0, 0])):
        people = with_groups(quadratics(targets), groups)
        made = on_quadratics(coterie.user_centric(streams=2), [], population=people)
        state, _, _ = drive(made, tmp_path / name, rounds=2)
        runs.append(replace(state, notes={}))
    assert torch.equal(runs[0].models[0].vector, runs[1].models[0].vector)


@pytest.mark.parametrize("streams", [1, 3, "all"])
def test_silhouettes_of_the_rows_are_noted_whatever_the_streams(streams):
    g = {c: (10.0 * (c % 2) + 0.3 * c, 0.0) for c in range(6)}
    _, state = start(told(g, dict.fromkeys(g, 9.0), {}), streams=streams)
    rows = np.array(state.notes["mixing"])
    wanted = {str(k): silhouette_score(rows, kmeans(rows, k)[0]) for k in range(2, 6)}
    assert state.notes["silhouette"] == pytest.approx(wanted, abs=1e-4)
    assert state.notes["streams"] == (6 if streams == "all" else streams)


def test_silhouettes_of_many_clients_are_left_out_unless_they_decide():
    g = {c: (float(c % 2), 0.0) for c in range(101)}
    _, state = start(told(g, {}, dict.fromkeys(g, 1)), streams=2)
    assert "silhouette" not in state.notes
    paper = {"streams": "auto", "select": "silhouette"}
    _, state = start(told(g, {}, dict.fromkeys(g, 1)), **paper)
    assert state.notes["silhouette"].keys() == {"2"}  # of identical rows there are two kinds
