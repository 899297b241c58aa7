"""CFL and the methods that group anew: limits, planted groups, newcomers, bytes, lost replies."""

import os

import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import nn

import coterie
from coterie.compose.grouped import combined
from coterie.core.method import Round
from coterie.core.tree import same
from coterie.data import ClientData, Population, Split, build_population, load
from coterie.engines.loop import Loop
from coterie.methods.cfl import cfl
from coterie.methods.regrouped import adaptive, clusterfl, fl_hc, flis
from coterie.models import make_model
from faulty import Faulty
from scripted import Spy, opened
from support import digits, drive, experiment, models, on_quadratics, same_bits

PEOPLE = digits(clients=6)
PARTIAL = {"rounds": 4, "cohort": 0.5}
INF = float("inf")


def trained(method, folder, population=PEOPLE, engine=None, **changes):
    made = experiment(method, population, **changes)
    state, channel, _ = drive(made, folder, engine)
    return models(made, state, channel)


# --- limits ---------------------------------------------------------------------------------------

NEVER_SPLITS = {
    "cfl, mean updates never small": lambda: cfl(eps1=0.0),
    "cfl, clients never at odds": lambda: cfl(eps1=INF, eps2=INF, relative=False),
    "cfl, guarded": lambda: cfl(eps1=INF, eps2=0.0, relative=False, gamma=1.0),
}
ONE_GROUP = {
    "fl-hc, before its clustering": lambda: fl_hc(rounds=9),
    "fl-hc, infinite threshold": lambda: fl_hc(rounds=1, threshold=INF),
    "fl-hc, at once": lambda: fl_hc(rounds=0, threshold=INF, metric="l1"),
    "fl-hc, one cluster": lambda: fl_hc(rounds=1, clusters=1, metric="cosine"),
    "flis, threshold 0": lambda: flis(threshold=0.0),
    "flis, every round": lambda: flis(threshold=0.0, graph="threshold", every=1),
    "adaptive, T = -1": lambda: adaptive(threshold=-1.0, every=2),
}


@pytest.mark.parametrize("name", NEVER_SPLITS | ONE_GROUP)
def test_is_fedavg_to_the_bit(name, tmp_path):
    ours = trained((NEVER_SPLITS | ONE_GROUP)[name](), tmp_path / "a")
    assert same_bits(ours, trained(coterie.fedavg(), tmp_path / "b"))


@pytest.mark.parametrize("name", ["cfl, mean updates never small", "cfl, clients never at odds"])
def test_cfl_is_fedavg_for_a_part_of_the_clients_too(name, tmp_path):
    ours = trained(NEVER_SPLITS[name](), tmp_path / "a", settings=PARTIAL)
    assert same_bits(ours, trained(coterie.fedavg(), tmp_path / "b", settings=PARTIAL))


def by_cohorts(method, folder, cohorts, **changes):
    made = experiment(method, PEOPLE, **changes)
    channel, _, plan = opened(made, folder)
    channel.begin(0, stage="init")
    state = method.init(channel, made.setup(plan.start))
    for number, cohort in enumerate(cohorts):
        channel.begin(number)
        state = method.round(channel, state, Round(number, cohort, made.public))
    return models(made, state, channel)


@pytest.mark.parametrize(
    ("method", "all_in"),
    [
        (lambda: fl_hc(rounds=1, threshold=INF), [1]),
        (lambda: flis(threshold=0.0), [0]),
        (lambda: adaptive(threshold=-1.0, every=3), [0, 3]),
    ],
    ids=["fl-hc", "flis", "adaptive"],
)
def test_with_few_clients_a_round_it_is_fedavg_with_all_in_the_round_of_the_clustering(
    method, all_in, tmp_path
):
    few = [[1, 4], [0, 2], [3, 5], [2, 3]]
    theirs = [list(range(6)) if n in all_in else cohort for n, cohort in enumerate(few)]
    assert same_bits(
        by_cohorts(method(), tmp_path / "a", few),
        by_cohorts(coterie.fedavg(), tmp_path / "b", theirs),
    )


def test_clusterfl_without_a_pull_is_local_to_the_bit(tmp_path):
    local = trained(coterie.local(), tmp_path / "b")
    for i, method in enumerate([clusterfl(k=2, alpha=0.0), clusterfl(k=6, alpha=0.0, every=1)]):
        assert same_bits(trained(method, tmp_path / f"{i}"), local)
    assert not same_bits(trained(clusterfl(k=2, alpha=0.5), tmp_path / "c"), local)


def test_what_is_not_at_its_limit_differs(tmp_path):
    fedavg, local = (trained(m, tmp_path / m.name) for m in (coterie.fedavg(), coterie.local()))
    for method in (
        cfl(eps1=INF, eps2=0.0, relative=False), fl_hc(rounds=1, clusters=2), flis(threshold=0.9),
        adaptive(threshold=0.3), clusterfl(k=2, alpha=0.5),
    ):  # fmt: skip
        ours = trained(method, tmp_path / f"x-{method.name}")
        assert not same_bits(ours, fedavg)
        assert not same_bits(ours, local)


# --- combined with objectives ---------------------------------------------------------------------


def test_cfl_with_ditto_has_cfls_groups_and_dittos_models(tmp_path):
    rule = {"eps1": INF, "eps2": 0.0, "relative": False}
    both = combined("cfl+ditto", {"cfl": cfl(**rule), "ditto": coterie.ditto(lam=0.5)})
    ours, channel, _ = drive(experiment(both, PEOPLE), tmp_path / "a")
    plain, _, _ = drive(experiment(cfl(**rule), PEOPLE), tmp_path / "b")
    assert len(set(plain.groups.values())) > 2
    assert ours.groups == plain.groups
    assert same(dict(ours.models), dict(plain.models))
    personal = models(experiment(both, PEOPLE), ours, channel)
    assert not any(
        torch.equal(v, ours.models[ours.groups[c]].vector) for c, v in enumerate(personal)
    )
    zero = combined("cfl+ditto", {"cfl": cfl(**rule), "ditto": coterie.ditto(lam=0.0)})
    alone = trained(zero, tmp_path / "c")
    assert same_bits(alone, trained(coterie.ditto(lam=0.0), tmp_path / "d"))


def test_fl_hc_with_fedprox(tmp_path):
    def made(mu):
        parts = {"fl-hc": fl_hc(rounds=1, clusters=2), "fedprox": coterie.fedprox(mu=mu)}
        return combined("fl-hc+fedprox", parts)

    plain = trained(fl_hc(rounds=1, clusters=2), tmp_path / "a")
    assert same_bits(trained(made(0.0), tmp_path / "b"), plain)
    assert not same_bits(trained(made(1.0), tmp_path / "c"), plain)
    one = combined("x", {"h": fl_hc(rounds=0, clusters=1), "p": coterie.fedprox(mu=1.0)})
    fedprox = trained(coterie.fedprox(mu=1.0), tmp_path / "d")
    assert same_bits(trained(one, tmp_path / "e"), fedprox)


# --- planted groups on quadratics -----------------------------------------------------------------

# Two groups, around 5 and around −5, of clients of different sizes.
TARGETS = [[5.0], [-5.0], [5.3, 5.1], [4.8], [-5.2, -5.4], [-4.7], [5.1], [-5.1]]
TRUTH = [0, 1, 0, 0, 1, 1, 0, 1]
FINDS = {
    "cfl": (cfl, 30),
    "fl-hc": (lambda: fl_hc(rounds=2, clusters=2), 3),
    "fl-hc cosine": (lambda: fl_hc(rounds=0, threshold=0.5, metric="cosine"), 1),
    "fl-hc by evidence": (lambda: fl_hc(rounds=2, trial="off"), 3),
    "adaptive": (lambda: adaptive(threshold=0.5, every=2), 5),
    "adaptive by evidence": (lambda: adaptive(every=2, trial="off"), 5),
    "clusterfl": (lambda: clusterfl(k=2, every=2), 5),
}


def ari(truth, groups):
    return adjusted_rand_score(truth, [str(groups.get(c)) for c in range(len(truth))])


@pytest.mark.parametrize("name", FINDS)
def test_planted_optima_are_found_and_reached(name, tmp_path):
    method, rounds = FINDS[name]
    made = on_quadratics(method(), TARGETS)
    state, _, _ = drive(made, tmp_path, rounds=rounds)
    assert ari(TRUTH, state.groups) == 1.0
    state, channel, _ = drive(made, tmp_path / "on", rounds=60)
    own = [float(m) for m in models(made, state, channel)]
    ups = [y for numbers, g in zip(TARGETS, TRUTH, strict=True) for y in numbers if g == 0]
    if name != "clusterfl":  # whose models are personal
        assert own[0] == pytest.approx(sum(ups) / len(ups), abs=1e-4)
    assert all((value > 4) == (g == 0) for value, g in zip(own, TRUTH, strict=True))


@pytest.mark.parametrize("name", FINDS)
def test_another_order_of_clients_changes_nothing(name, tmp_path):
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    method, rounds = FINDS[name]
    plain, turned = (on_quadratics(method(), t) for t in (TARGETS, [TARGETS[c] for c in order]))
    state, channel, _ = drive(plain, tmp_path / "a", rounds=rounds)
    ours = [float(m) for m in models(plain, state, channel)]
    other, channel, _ = drive(turned, tmp_path / "b", rounds=rounds)
    theirs = [float(m) for m in models(turned, other, channel)]
    assert theirs == pytest.approx([ours[c] for c in order], abs=1e-6)
    same_group = {(c, d) for c in range(8) for d in range(8) if state.groups[c] == state.groups[d]}
    assert same_group == {
        (order[c], order[d])
        for c in range(8) for d in range(8) if other.groups[c] == other.groups[d]
    }  # fmt: skip


def test_cfl_with_a_tenth_waits_until_the_common_model_is_at_rest(tmp_path):
    """From 2 all of them first move to the optimum of all, −0.01; near it they part.

    The distance to it, and so the mean update, shrinks to 0.8 of itself in a round: 0.8^10 = 0.107,
    0.8^11 = 0.086 is the first below a tenth. The largest update is 1.08 then, that of the first
    round was 0.2·7.3: more than 0.6 of it.
    """
    made = on_quadratics(cfl(eps1=0.1), TARGETS, start=2.0)
    before, _, _ = drive(made, tmp_path / "a", rounds=11)
    assert set(before.groups.values()) == {"0"}
    state, _, _ = drive(made, tmp_path / "b", rounds=12)
    assert len(set(state.groups.values())) == 2
    assert ari(TRUTH, state.groups) == 1.0


# --- planted groups in a small linear problem -----------------------------------------------------


def blobs(clients=12, groups=3, samples=60, seed=0):
    """Gaussian blobs of as many kinds as classes; each group names the kinds in its own way."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.eye(groups, 6)
    people = []

    def some(count):
        kind = torch.randint(0, groups, (count,), generator=generator)
        return centres[kind] + torch.randn(count, 6, generator=generator), kind

    for client in range(clients):
        x, kind = some(samples)
        y = (kind + client % groups) % groups
        people.append(ClientData(Split(x[:40], y[:40]), *[Split(x[40:], y[40:])] * 2))
    classes = tuple(str(c) for c in range(groups))
    return Population(
        tuple(people), "table", (6,), classes, groups, tuple(c % groups for c in range(clients)),
        public=some(50)[0],
    )  # fmt: skip


BLOBS = blobs()
LINEAR = {
    "cfl": (lambda: cfl(eps1=0.5, eps2=0.4), 12),
    "fl-hc": (lambda: fl_hc(rounds=1, clusters=3), 3),
    "fl-hc l1": (lambda: fl_hc(rounds=1, clusters=3, metric="l1"), 3),
    "fl-hc by evidence": (lambda: fl_hc(rounds=1, trial="off"), 3),
    "fl-hc by trial": (lambda: fl_hc(rounds=1), 3),
    "flis": (lambda: flis(threshold=0.9), 3),
    "flis threshold": (lambda: flis(threshold=0.95, graph="threshold", every=2), 3),
    "flis by evidence": (lambda: flis(trial="off"), 3),
    "adaptive": (lambda: adaptive(threshold=0.5, every=2), 6),
    "adaptive by evidence": (lambda: adaptive(trial="off"), 3),
    "clusterfl": (lambda: clusterfl(k=3, every=2), 5),
}


def on_blobs(method, **changes):
    changes = {"model": lambda: nn.Linear(6, 3)} | changes
    return experiment(method, BLOBS, schedule={"epochs": 2, "momentum": 0.0}, **changes)


@pytest.mark.parametrize("name", LINEAR)
def test_planted_groups_are_found_and_newcomers_land_right(name, tmp_path):
    method, rounds = LINEAR[name]
    made = on_blobs(method(), settings={"rounds": rounds, "holdout": 4})
    state, channel, _ = drive(made, tmp_path)
    truth = [BLOBS.groups[c] for c in made.members]
    assert adjusted_rand_score(truth, [str(state.groups[c]) for c in made.members]) == 1.0
    channel.begin(rounds, stage="admit")
    after = made.method.admit(channel, state, Round(rounds, made.newcomers, made.public))
    assert ari(BLOBS.groups, after.groups) == 1.0
    assert same(dict(after.models), dict(state.models))
    assert {c: after.groups[c] for c in made.members} == state.groups


@pytest.mark.parametrize("name", LINEAR)
def test_planted_groups_are_found_by_a_part_of_the_clients_at_a_time(name, tmp_path):
    method, rounds = LINEAR[name]
    made = on_blobs(method(), settings={"rounds": rounds + 6, "cohort": 0.5})
    state, _, _ = drive(made, tmp_path)
    assert ari(BLOBS.groups, state.groups) == 1.0


@pytest.mark.parametrize("name", ["fl-hc", "flis", "adaptive", "clusterfl"])
def test_whose_reply_was_lost_in_the_clustering_finds_its_group_later(name, tmp_path):
    method, _ = LINEAR[name]
    clustering = "2.0" if name == "fl-hc" else "1.0"
    made = on_blobs(method())

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: c in (0, 7) and o == clustering)

    rounds = int(clustering[0])
    state, channel, _ = drive(made, tmp_path / "a", lossy, rounds=rounds)
    assert sorted(set(range(12)) - set(state.groups)) == [0, 7]
    assert channel.state.ledger.lost == 2
    state, _, _ = drive(made, tmp_path / "b", lossy, rounds=rounds + 1)
    assert ari(BLOBS.groups, state.groups) == 1.0


@pytest.mark.parametrize("client", range(8))
def test_whose_reply_was_lost_when_cfl_split_walks_to_its_group(client, tmp_path):
    """Of one round from 0: changes of about 1 each way, whose mean without anyone is below 0.3."""
    made = on_quadratics(cfl(eps1=0.3, eps2=0.9, relative=False), TARGETS)

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: (c, o) == (client, "1.0"))

    state, _, _ = drive(made, tmp_path / "a", lossy, rounds=1)
    assert sorted(state.groups) == [c for c in range(8) if c != client]
    state, channel, _ = drive(made, tmp_path / "b", lossy, rounds=2)
    assert ari(TRUTH, state.groups) == 1.0
    assert channel.state.ledger.lost == 1


# --- bytes ----------------------------------------------------------------------------------------


def traffic(method, folder, cohorts):
    """Round by round: who was sent a model, and how many models the ledger has, down and up."""
    made = on_blobs(method, model=lambda: nn.Sequential(nn.Linear(6, 900), nn.Linear(900, 3)))
    channel, engine, plan = opened(made, folder)
    size, found = 4 * plan.start.layout.size, []
    channel.begin(0, stage="init")
    state, before = method.init(channel, made.setup(plan.start)), channel.state.ledger.total
    for number, cohort in enumerate(cohorts):
        channel.begin(number)
        state = method.round(channel, state, Round(number, cohort, made.public))
        moved = channel.state.ledger.total
        asked = sorted(s.client for s in engine.seen if s.order.startswith(f"{number + 1}."))
        # Whole models, and heads that are less than one model all together.
        found.append((asked, (moved.down - before.down) // size, (moved.up - before.up) // size))
        before = moved
    return found, state


EVERYBODY = list(range(12))
FEW = [[1, 4, 7], [0, 2], [3, 5, 6, 8], [9, 10, 11]]


@pytest.mark.parametrize(
    ("method", "full"),
    [
        (fl_hc(rounds=1, clusters=3), [1]),
        (flis(threshold=0.9), [0]),
        (flis(threshold=0.9, every=3), [0, 3]),
        (adaptive(threshold=0.5, every=2), [0, 2]),
        (clusterfl(k=3, every=3), [0, 3]),
    ],
    ids=["fl-hc", "flis", "flis every 3", "adaptive", "clusterfl"],
)
def test_the_bytes_of_everybody_are_counted_in_a_clustering(method, full, tmp_path):
    seen, _ = traffic(method, tmp_path, FEW)
    expected = [EVERYBODY if n in full else cohort for n, cohort in enumerate(FEW)]
    assert seen == [(clients, len(clients), len(clients)) for clients in expected]


def test_the_fresh_updates_that_cfl_asks_for_are_counted(tmp_path):
    """Wherever the cohort passes the test, each member of its group trains once, and once only."""
    always = cfl(eps1=INF, eps2=0.0, relative=False)
    seen, state = traffic(always, tmp_path / "a", [[0, 1, 2], [0, 3]])
    assert seen[0] == (EVERYBODY, 12, 12)
    first = state.memory["splits"]["0"]
    assert first["round"] == 0
    clients, down, up = seen[1]
    assert down == up == len(clients) == len(set(clients)) < 12
    assert {0, 3} < set(clients)
    never, _ = traffic(cfl(eps1=0.0), tmp_path / "b", FEW)
    assert never == [(cohort, len(cohort), len(cohort)) for cohort in FEW]


def test_a_newcomers_walk_is_counted(tmp_path):
    made = on_blobs(LINEAR["cfl"][0](), settings={"rounds": 12, "holdout": 4})
    state, channel, engine = drive(made, tmp_path, Spy)
    before = dict(channel.state.ledger.method)
    channel.begin(12, stage="admit")
    after = made.method.admit(channel, state, Round(12, made.newcomers))
    for c in made.newcomers:
        levels = len(str(after.groups[c])) - 1
        walks = [s for s in engine.seen if s.client == c and s.task == "walk"]
        assert len(walks) == levels >= 1
        assert c not in before
        assert (
            channel.state.ledger.method[c].up
            > levels * 4 * made.plan(tmp_path / "x").start.layout.size
        )


# --- real images ----------------------------------------------------------------------------------


@pytest.mark.skipif(
    "COTERIE_DATA" not in os.environ,
    reason="set COTERIE_DATA to a folder that holds fashion-mnist to run these",
)
@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        pytest.param(cfl(eps1=0.4), 30, marks=pytest.mark.e2e),
        (fl_hc(rounds=2, clusters=4), 3),
        (fl_hc(rounds=2, trial="off"), 3),
        (flis(trial="off"), 1),
        (adaptive(trial="off"), 1),
        (clusterfl(k=4, every=2), 3),
    ],
    ids=["cfl", "fl-hc", "fl-hc by evidence", "flis", "adaptive", "clusterfl"],
)
def test_the_four_groups_are_found_in_fashion_mnist(method, rounds, tmp_path):
    people = build_population(
        load("fashion-mnist", folder=os.environ["COTERIE_DATA"]), clients=20, partition="iid",
        shift="label-permutation", shift_params={"groups": 4}, samples=4000, public=100,
    )  # fmt: skip
    made = experiment(
        method, people, schedule={"epochs": 2, "batch_size": 16},
        model=lambda: make_model("mlp", people.shape, people.targets, hidden=(32,)),
    )  # fmt: skip
    state, _, _ = drive(made, tmp_path, rounds=rounds)
    assert ari(people.groups, state.groups) == 1.0


@pytest.mark.parametrize(
    "method",
    [coterie.fedclust(), coterie.adaptive(), coterie.fl_hc(rounds=0)],
    ids=lambda m: m.name,
)
def test_groups_in_conflict_train_apart_from_the_first_round_as_the_true_ones_do(method, tmp_path):
    """Where the evidence is decided and right, the trial costs no round of training."""
    raw = load("digits")
    people = build_population(
        raw,
        clients=12,
        partition="iid",
        shift="label-permutation",
        shift_params={"groups": 3},
        seed=1,
    )
    changes = {"schedule": {"epochs": 1, "batch_size": 10, "lr": 0.1}, "settings": {"rounds": 3}}
    state, channel, _ = drive(made := experiment(method, people, **changes), tmp_path / "a")
    assert adjusted_rand_score(people.groups, [str(state.groups[c]) for c in range(12)]) == 1.0
    oracle = trained(coterie.oracle(), tmp_path / "b", people, **changes)
    assert same_bits(models(made, state, channel), oracle)
