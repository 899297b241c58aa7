"""Where noise would hide less than it says: other uploads, other sums, other draws of clients."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import coterie
from coterie import Method, Order, State, Upload, Weights
from coterie.channel.privacy.accounting import gaussian_epsilon
from coterie.channel.privacy.settings import Privacy
from coterie.channel.tasks import SECURE
from coterie.engines.loop import Loop
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute, with_settings
from coterie.experiment.privacy import Guard
from faulty import Faulty
from guarded import Driven, secured
from scripted import Spy
from support import (
    ROWS,
    Stop,
    digits,
    experiment,
    on_quadratics,
    quadratics,
    stop_after,
    with_groups,
)

PEOPLE = digits(samples=180)
SIZE, Z, S = 2000, 1.3, 0.25


class Wide(nn.Module):
    """Many parameters, of which one answers."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x):
        return self.theta[:1].expand(len(x))


def asking(train, round=None, init=None, name="asking"):
    """A method of one model whose clients do this; a round makes one mean, if it is not given."""

    def ordered(state, clients):
        return [Order(c, "train", {"model": state.models[0]}) for c in clients]

    def usual(fed, state, info):
        mean = fed.reduce(ordered(state, info.cohort), {c: {0: 1.0} for c in info.cohort})[0]
        return replace(state, models={0: mean.arrays["model"]})

    def begun(fed, setup):
        state = State({0: setup.start}, dict.fromkeys(setup.clients, 0))
        if init is not None:
            init(fed, ordered(state, setup.clients))
        return state

    return Method(
        name=name,
        init=begun,
        round=usual if round is None else lambda *a: round(usual, *a),
        sends=lambda state, client: {"model": state.models[0]},
        tasks={"train": train},
        assemble=lambda client, received: received["model"],
    )


def stepping(client, received, config):
    """Move towards one's own number."""
    model = received["model"]
    moved = Weights(model.layout, model.vector + float(client.train.y.mean()))
    return Upload({"model": moved}, {"loss": 1.0}, {"model": "model"})


def spread(values, expected, tail=1e-7):
    """Whether so many Gaussian numbers have this standard deviation, by their sum of squares."""
    low, high = stats.chi2.ppf([tail, 1 - tail], len(values))
    return low < float((np.asarray(values) ** 2).sum()) / expected**2 < high


# --- local noise: the same for the same upload, another for another -----------------------------


def remembering(client, received, config):
    """Upload what was noted before, a little of it in every number; note the model's first."""
    model, noted = received["model"], float(client.state.get("noted", 0.0))
    if config.get("note"):
        client.state["noted"] = float(model.vector[0])
    moved = Weights(model.layout, model.vector + 1e-3 * noted)
    return Upload({"model": moved}, {}, {"model": "model"})


def watched(folder, **privacy):
    settings = {"privacy": Privacy(**{"noise": Z, "clip": S, "mechanism": "local", **privacy})}
    made = on_quadratics(asking(remembering), [[1.0]] * 3, settings=settings)
    return Driven(replace(made, model=Wide), folder)


def asked(on, round, value=0.0, expects="", note=False, client=0):
    """What a server gets that says which state a client is to start from, with a model of its own.

    Orders of a round are named alike, so that the same order can be given again.
    """
    on.channel.state.versions.clear()
    on.channel.state.versions |= {client: expects} if expects else {}
    on.channel.begin(round)
    model = on.plan.start * 0.0
    model.vector[0] = value
    order = Order(client, "train", {"model": model}, {"note": note})
    return on.channel.exchange([order])[0]


def numbers(reply):
    return reply.arrays["model"].vector.double().numpy()


RANDOM = pytest.mark.parametrize("randomness", ["simulated", "system"])


@RANDOM
@pytest.mark.parametrize("kind", [{}, {"mechanism": "nbafl", "noise": None, "epsilon": 0.5}])
def test_the_same_order_again_gets_the_same_bytes(tmp_path, randomness, kind):
    on = watched(tmp_path, randomness=randomness, **kind)
    first, again = numbers(asked(on, 3)), numbers(asked(on, 3))
    anew = numbers(asked(watched(tmp_path, randomness=randomness, **kind), 3))  # after a restart
    assert np.array_equal(first, again)
    assert np.array_equal(first, anew)
    assert first.std() > 0.1
    others = [numbers(asked(on, 4)), numbers(asked(on, 3, client=1))]
    assert np.abs(np.corrcoef([first, *others]) - np.eye(3)).max() < 0.12


@RANDOM
@pytest.mark.parametrize("kind", [{}, {"mechanism": "nbafl", "noise": None, "epsilon": 0.5}])
def test_another_upload_of_the_same_order_has_other_noise(tmp_path, randomness, kind):
    """The client's state was sent back and made another: the difference must not be bare."""
    on = watched(tmp_path, randomness=randomness, **kind)
    found = []
    for noted in (1.0, 2.0):
        before = asked(on, 2, noted, note=True)
        found.append(numbers(asked(on, 3, expects=before.version)))
    bare = 1e-3 * (2.0 - 1.0)
    apart = found[1] - found[0] - bare
    sigma = Z * S if not kind else found[0].std()
    assert sigma > 100 * bare
    assert spread(apart, math.sqrt(2) * sigma, tail=1e-6)
    assert abs(np.corrcoef(found)[0, 1]) < 0.12


# --- under secure aggregation a client adds what its own settings ask for -----------------------


class Noting(Loop):
    """An engine that notes what clients answer to the step that brings their values."""

    def __init__(self, plan):
        super().__init__(plan)
        self.values = []

    def exchange(self, requests, until=None):
        asked = {r.client: self._runtime.wire.unpack(r.message) for r in requests}
        for client, answer in super().exchange(requests, until):
            body = asked[client]
            if body["task"] == SECURE and body["beside"]["step"] == "shares":
                self.values.append((answer, self._runtime.wire.unpack(answer)))
            yield client, answer


MEDIAN = {"noise": 0.2, "clipping": "median"}  # 6 clients: 0.3 on the bits, 0.2121 on the changes


def told(folder, lie, **privacy):
    """A round whose server tells everybody this of the noise."""
    made = secured(coterie.fedavg(), Privacy(secure=True, **{"noise": 1.0, **privacy}))
    on = Driven(made, folder, engine=Noting)
    honest = on.channel.exchange

    def exchange(orders, beside=None, adopt=True):
        said = {c: dict(t) for c, t in (beside or {}).items()}
        for words in said.values():
            if "noise" in words:
                words["noise"] = {**words["noise"], **lie}
        return honest(orders, said or None, adopt)

    on.channel.exchange = exchange
    return on


@pytest.mark.parametrize(
    ("lie", "privacy"),
    [
        ({"multiplier": 0.999}, {}),
        ({"multiplier": 0.0}, {}),
        ({"multiplier": -5.0}, {}),
        ({"multiplier": math.nan}, {}),
        ({"bits": 9.0}, {}),  # nobody should ask for bits
        ({"multiplier": 50.0, "bits": 9.0}, {}),
        ({"multiplier": 0.2}, MEDIAN),  # enough for the changes alone, not beside the bits
        ({"bits": 0.15}, MEDIAN),
        ({"multiplier": 50.0, "bits": 0.05}, MEDIAN),
        ({"multiplier": 50.0, "bits": -0.05}, MEDIAN),
    ],
)
def test_who_is_told_to_add_less_noise_sends_nothing(tmp_path, lie, privacy):
    on = told(tmp_path, lie, **privacy)
    before = on.state
    with pytest.raises(ConfigError, match="was told to add less noise than the run's settings"):
        on.round(0)
    assert on.state is before
    assert on.engine.values
    for message, body in on.engine.values:
        assert body["error"] == "ConfigError"
        assert not body.get("arrays")
        assert not message.payloads


@pytest.mark.parametrize(
    ("lie", "privacy"), [({}, {}), ({}, MEDIAN), ({"multiplier": 1.5}, {}), ({"bits": 2.0}, MEDIAN)]
)
def test_who_is_told_to_add_enough_sends_its_values(tmp_path, lie, privacy):
    on = told(tmp_path, lie, **privacy)
    on.round(0)
    assert bool(on.abandoned) == bool(lie)  # who is told a lie signs it, not what was said
    assert len(on.engine.values) == 6
    assert all(body["arrays"]["secure"].numel() > 100 for _, body in on.engine.values)


# --- draws of clients that ε does not cover -----------------------------------------------------


def planned(method=None, people=PEOPLE, **settings):
    """Whether a run could begin: its plan."""
    privacy = settings.pop("privacy", {"noise": 0.5})
    settings = {"rounds": 2, "evaluate_every": 0, "privacy": Privacy(**privacy), **settings}
    return experiment(method or coterie.fedavg(), people, settings=settings)


def refused(made, folder, words):
    with pytest.raises(ConfigError, match=words):
        made.plan(folder)


def test_a_deadline_on_a_shared_channel_is_refused_with_central_noise(tmp_path):
    late = {"deadline": 1e6, "sampling": "fixed"}
    wireless, links = {"name": "wireless", "system": 2}, {"name": "links"}
    refused(planned(clock=wireless, **late), tmp_path, "clock.name = wireless lets one client make")
    planned(clock=links, **late).plan(tmp_path)
    planned(clock=wireless).plan(tmp_path)
    planned(clock=wireless, privacy={"noise": 0.5, "mechanism": "local"}, **late).plan(tmp_path)
    planned(clock=wireless, privacy={}, **late).plan(tmp_path)


@pytest.mark.parametrize("mechanism", ["central", "local"])
def test_layers_that_rest_by_what_clients_report_are_refused(tmp_path, mechanism):
    method = ROWS["fedavg layer-wise"]()
    made = planned(method, privacy={"noise": 0.5, "mechanism": mechanism})
    refused(made, tmp_path, "skips layers according to numbers that clients report.*layer_interval")
    planned(method, privacy={}).plan(tmp_path)


def test_numbers_of_single_clients_are_not_gathered_before_admission(tmp_path):
    def counting(client, received, config):
        return Upload({}, {"many": float(len(client.train))})

    def round(usual, fed, state, info):
        orders = [Order(c, "count") for c in info.cohort]
        assert fed.gather([]) == []
        fed.gather(orders)
        return usual(fed, state, info)

    method = replace(
        asking(stepping, round),
        tasks={"train": stepping, "count": counting},
    )
    assert method.sees != "each"
    settings = {"privacy": Privacy(noise=0.5)}
    on = Driven(on_quadratics(method, [[1.0]] * 4, settings=settings), tmp_path, engine=Spy)
    with pytest.raises(ConfigError, match=r"uses single clients' replies \(task 'count'\)"):
        on.round(0)
    assert not on.engine.seen  # nobody was asked
    local = with_settings(on.made, privacy=Privacy(noise=0.5, mechanism="local"))
    Driven(local, tmp_path / "local").round(0)


@pytest.mark.parametrize("privacy", [{}, {"secure": True}])
def test_newcomers_are_admitted_after_the_last_release(privacy):
    settings = {"noise": 0.5, "small_groups": "skip", **privacy}
    made = planned(coterie.ifca(k=2), digits(8), privacy=settings, holdout=2)
    result = execute(made)
    came = result.newcomers
    assert len(came) == 2
    assert {result.state.groups[c] for c in came} <= {0, 1}
    assert result.summary["privacy"]["releases"] == 2


def nbafl(**more):
    return {"privacy": {"mechanism": "nbafl", "epsilon": 0.5, **more}}


def test_nbafl_is_for_one_mean_of_everybody(tmp_path):
    with pytest.raises(ConfigError, match=r"method oracle asks for means of several groups"):
        execute(planned(coterie.oracle(), **nbafl()))
    one = with_groups(PEOPLE, [0] * 6)
    assert execute(planned(coterie.oracle(), one, **nbafl())).rounds == 2
    everybody = "proved for full participation"
    refused(planned(cohort=1, **nbafl()), tmp_path, everybody)  # one client, not all of them
    refused(planned(cohort=5, **nbafl()), tmp_path, everybody)
    refused(planned(cohort=0.5, **nbafl()), tmp_path, everybody)
    off = {"clock": {"name": "links"}, "availability": {"name": "diurnal"}}
    refused(planned(**off, **nbafl()), tmp_path, everybody)
    planned(cohort=1.0, **nbafl()).plan(tmp_path)
    eight = planned(people=digits(8, samples=160), cohort=8, rounds=1, **nbafl())
    assert execute(eight).rounds == 1


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        *(
            (own, f"privacy.{key} = .* is about noise, and there is none")
            for key, own in {
                "mechanism": {"mechanism": "local"},
                "delta": {"delta": 1e-5},
                "clip": {"clip": 2.0},
                "clipping": {"clipping": "median"},
                "quantile": {"quantile": 0.3},
                "clip_rate": {"clip_rate": 0.1},
                "exposures": {"exposures": 3},
            }.items()
        ),
        ({"secure": True, "clip": 2.0}, "privacy.clip = 2.0 is about noise"),
        ({"noise": 0.5, "exposures": 3}, "privacy.exposures = 3 has no effect with this mechanism"),
        (
            {"noise": 0.5, "epsilon": 0.5, "mechanism": "nbafl"},
            "privacy.noise = 0.5 has no effect with this mechanism",
        ),
        *(
            ({"noise": 0.5, key: bad}, f"privacy.{key} = {bad}: must be a finite number")
            for key in ("epsilon", "noise", "clip", "clip_rate")
            for bad in (math.inf, math.nan)
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, privacy, words):
    with pytest.raises(ConfigError, match=words):
        Privacy(**privacy).check()


@pytest.mark.parametrize("mechanism", ["central", "local", "nbafl"])
def test_one_client_hides_among_nobody(tmp_path, mechanism):
    settings = {"privacy": Privacy(mechanism=mechanism, epsilon=0.5)}
    alone = on_quadratics(coterie.fedavg(), [[1.0]], settings=settings)
    refused(alone, tmp_path, "noise hides one client among others, but there is only one")
    told = {"privacy": replace(settings["privacy"], delta=1e-3)}
    refused(with_settings(alone, **told), tmp_path, "there is only one")
    two = on_quadratics(coterie.fedavg(), [[1.0], [2.0]], settings=settings)
    two.plan(tmp_path)
    refused(with_settings(two, holdout=1), tmp_path, "there is only one")


# Of 29 others, 2 are drawn by fair coins with probability 406 / 2²⁹ = 7.56e-7: then the thirtieth
# makes a sum of three. A tenth of δ must be above that, once a round.
EDGE = {"secure": True, "noise": 1.0}


@pytest.mark.parametrize(
    ("privacy", "settings", "good"),
    [
        ({**EDGE, "delta": 2e-5}, {"rounds": 2}, True),
        ({**EDGE, "delta": 2e-5}, {"rounds": 3}, False),
        ({**EDGE, "delta": 1.4e-5}, {"rounds": 2}, False),
        ({**EDGE, "delta": 2e-5, "min_group": 4}, {"rounds": 2}, False),
        ({**EDGE, "delta": 2e-5, "min_group": 2}, {"rounds": 3}, True),
        ({**EDGE, "delta": 2e-5}, {"rounds": 2, "cohort": 6}, False),
        ({**EDGE, "delta": 2e-5}, {"rounds": 99, "cohort": 24}, True),
        ({**EDGE, "delta": 2e-5}, {"rounds": 9, "cohort": 6, "sampling": "fixed"}, True),
        ({**EDGE, "delta": 2e-5}, {"rounds": 9, "cohort": 1.0}, True),
        ({"noise": 1.0, "delta": 2e-5}, {"rounds": 9, "cohort": 6}, True),
        ({"secure": True}, {"rounds": 9, "cohort": 6}, True),
    ],
)
def test_cohorts_drawn_near_the_smallest_sum_are_refused(tmp_path, privacy, settings, good):
    settings = {"cohort": 0.5, "sampling": "poisson", "privacy": Privacy(**privacy), **settings}
    made = on_quadratics(coterie.fedavg(), [[1.0]] * 30, settings=settings)
    plan = made.plan(tmp_path)
    arguments = (plan, made.settings.policy, made.members, made.settings.rounds)
    if good:
        Guard(*arguments)
        return
    with pytest.raises(ConfigError, match=r"one client decides over privacy.min_group.*run.cohort"):
        Guard(*arguments)


# --- the budget of local noise ------------------------------------------------------------------


def twice_later(usual, fed, state, info):
    """One mean in the first round, two in every other."""
    state = usual(fed, state, info)
    return usual(fed, state, info) if info.number else state


def budgeted(uploads, method=None, **settings):
    """A budget that holds so many uploads of a client, and no more."""
    noise, delta = 9.0, 1e-3
    budget = gaussian_epsilon(noise / 2 / math.sqrt(uploads), delta) * (1 + 1e-6)
    privacy = Privacy(mechanism="local", noise=noise, epsilon=budget, delta=delta)
    settings = {"rounds": 10, "evaluate_every": 0, "privacy": privacy, **settings}
    method = method or asking(stepping, twice_later)
    return on_quadratics(method, [[1.0], [2.0], [3.0]], settings=settings)


@pytest.mark.parametrize(("uploads", "rounds"), [(3, 2), (4, 3), (5, 3), (6, 4)])
def test_a_method_that_asks_twice_in_a_round_never_exceeds_the_budget(uploads, rounds):
    made = budgeted(uploads)
    result = execute(made)
    told, budget = result.summary["privacy"], made.settings.privacy.epsilon
    assert told["epsilon"] <= budget
    assert told["releases"] == uploads  # all that there is room for
    assert result.rounds == rounds
    gone = [n for n, event in enumerate(result.history) if "abandoned" in event]
    assert gone == ([] if uploads % 2 else [rounds - 1])  # there was room for one of the two
    for number in gone:
        assert "more uploads than the privacy budget" in result.history[number]["abandoned"]
    assert "has no room for another round" in result.summary["stopped"]


def test_an_abandoned_round_leaves_the_model_as_it_was():
    whole, short = execute(budgeted(5, rounds=2)), execute(budgeted(4))
    assert "abandoned" in short.history[2]
    assert torch.equal(whole.state.models[0].vector, short.state.models[0].vector)


def test_a_method_that_is_set_up_by_more_than_the_budget_is_refused():
    def init(fed, orders):
        fed.gather(orders)
        fed.gather(orders)

    with pytest.raises(ConfigError, match="more uploads than the privacy budget allows"):
        execute(budgeted(1, asking(stepping, init=init)))
    result = execute(budgeted(3, asking(stepping, init=init)))
    assert result.rounds == 1


@pytest.mark.parametrize(("name", "uploads"), [("k-fed", 4), ("fedclust", 4), ("fedavg", 3)])
def test_a_budget_of_local_noise_lasts_for_all_rounds_and_one_upload_more(name, uploads):
    privacy = {"epsilon": 8.0, "mechanism": "local"}
    result = execute(planned(ROWS[name](), privacy=privacy, rounds=3))
    assert result.rounds == 3
    assert not result.summary["stopped"]
    told = result.summary["privacy"]
    assert told["releases"] == uploads
    assert told["epsilon"] <= 8.0
    if uploads == 4:
        assert told["epsilon"] > 0.98 * 8.0


def test_nbafl_stops_after_as_many_rounds_as_its_noise_is_for(tmp_path):
    made = planned(rounds=5, **nbafl(exposures=1, aggregations=2))
    words = "NbAFL's noise is for 2 rounds"
    whole = execute(made)
    assert (whole.rounds, whole.summary["stopped"]) == (2, words)
    short = with_settings(made, rounds=2)
    with pytest.raises(Stop):
        execute(short, tmp_path / "r", watch=stop_after(1))
    execute(short, tmp_path / "r", resume=True)
    more = execute(made, tmp_path / "r", resume=True)
    assert (more.rounds, more.summary["stopped"]) == (2, words)


def test_nbafl_goes_on_when_few_uploads_are_seen_and_its_server_adds_noise():
    found = execute(planned(rounds=5, **nbafl(exposures=1)))
    assert (found.rounds, found.summary["stopped"]) == (5, "")
    assert found.summary["privacy"]["downlink"] > 0  # 5 rounds are more than 1·√clients
    with pytest.raises(ConfigError, match="cannot be seen in 5 rounds"):
        execute(planned(rounds=5, **nbafl(exposures=6)))


# --- what a mean says of how many there were ----------------------------------------------------


def mean_of(method, folder, lost=(), clients=6, rounds=1, **settings):
    """The means of each round, where these clients never answer."""
    privacy = Privacy(**{"noise": 0.5, **settings.pop("privacy", {})})
    settings = {"rounds": rounds, "privacy": privacy, **settings}
    found = []

    class Keeping:
        def __init__(self, fed):
            self.fed, self.clients = fed, fed.clients

        def __getattr__(self, name):
            return getattr(self.fed, name)

        def reduce(self, *orders, **how):
            found.append(self.fed.reduce(*orders, **how))
            return found[-1]

    def engine(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, order: c in lost)

    made = experiment(method, digits(clients, samples=30 * clients), settings=settings)
    Driven(made, folder, engine=engine, around=Keeping).all()
    return found


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("lost", [(), (0,), (0, 5)])
def test_a_mean_tells_how_many_were_expected_not_how_many_answered(tmp_path, secure, lost):
    mean = mean_of(coterie.fedavg(), tmp_path, lost, privacy={"secure": secure})[0][0]
    assert len(mean.clients) == 6 - len(lost)
    assert mean.examples == 6


def test_with_coins_it_is_the_mean_number_too(tmp_path):
    settings = {"cohort": 0.5, "sampling": "poisson", "rounds": 6}
    means = [m[0] for m in mean_of(coterie.fedavg(), tmp_path, **settings)]
    assert {m.examples for m in means} == {3}
    assert len({len(m.clients) for m in means}) > 1


def test_of_several_groups_it_is_the_noised_number(tmp_path):
    means = mean_of(coterie.ifca(k=2), tmp_path, clients=12, rounds=8)
    off = [mean.examples - len(mean.clients) for groups in means for mean in groups.values()]
    assert len(set(off)) > 3  # noise of 4 · 0.5 on each
    assert all(mean.examples >= 1 for groups in means for mean in groups.values())


# --- shapes that tell something -----------------------------------------------------------------


def shaped(shape):
    """A method whose clients also send an array of their own shape."""

    def train(client, received, config):
        sent = stepping(client, received, config)
        return replace(sent, arrays={**sent.arrays, "more": torch.zeros(shape(client))})

    def round(usual, fed, state, info):
        fed.gather([Order(c, "train", {"model": state.models[0]}) for c in info.cohort])
        return state

    return asking(train, round)


@pytest.mark.parametrize(
    ("shape", "good"),
    [
        (lambda c: (len(c.train), 2), False),
        (lambda c: (2, 3) if c.id else (3, 2), False),
        (lambda c: (4, 2), True),
    ],
)
def test_arrays_whose_shapes_differ_are_refused_under_local_noise(tmp_path, shape, good):
    settings = {"privacy": Privacy(noise=0.5, mechanism="local")}
    targets = quadratics([[1.0], [2.0, 2.0], [3.0]])
    on = Driven(on_quadratics(shaped(shape), [], population=targets, settings=settings), tmp_path)
    if good:
        on.round(0)
        return
    with pytest.raises(ConfigError, match="method asking sends 'more' in a shape that depends on"):
        on.round(0)
