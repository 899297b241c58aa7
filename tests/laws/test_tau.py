"""Adaptive numbers of steps on quadratics, by hand; around methods; within a budget.

A client's loss is the mean of (θ − y)²: β is 2 everywhere, its gradient 2(θ − ȳ), and a step with
lr 0.1 is θ ← θ − 0.2(θ − ȳ).
"""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

import coterie
from coterie.client.store import Store
from coterie.compose.adaptive_steps import KEY, LOSS, adaptive_steps
from coterie.core.method import Budget, Round, Spent, State
from coterie.core.tree import read_tree, same, write_tree
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.errors import ConfigError
from coterie.experiment.experiment import cohort
from coterie.methods.adaptive_tau import adaptive_tau
from coterie.models import make_model
from faulty import Faulty
from scripted import Spy, opened
from support import digits, drive, experiment, models, on_quadratics, same_bits

PLENTY = Budget(seconds=1e6)


@dataclass
class Metered:
    """A federation with a price list: seconds for a step and for an exchange.

    What clients compute besides is charged alike, by the share of their work that they say it was;
    a loss is a third of a step.
    """

    fed: object
    step: float = 1.0
    exchange: float = 1.0
    spent: Spent = field(default_factory=Spent)
    asked: list = field(default_factory=list)
    min_group = 1

    @property
    def clients(self):
        return self.fed.clients

    def gather(self, orders):
        replies = self.fed.gather(orders)
        self._charge(orders, replies)
        return replies

    def reduce(self, orders, into, by_examples=True):
        means = self.fed.reduce(orders, into, by_examples)
        self._charge(orders, means.values())
        return means

    def average(self, replies, into, by_examples=True):
        return self.fed.average(replies, into, by_examples)

    def _charge(self, orders, answers):
        self.asked.append({o.task for o in orders})
        steps = max(int(o.config.get("steps", 0)) for o in orders)
        shares = [float(a.arrays[KEY][5]) for a in answers if steps and KEY in a.arrays]
        passes = steps / min(shares, default=1.0) if steps else 1 / 3
        self.spent = replace(
            self.spent,
            computation=self.spent.computation + self.step * passes,
            communication=self.spent.communication + self.exchange,
        )


@dataclass
class Ran:
    state: State
    notes: list
    fed: Metered
    channel: object
    made: object
    begun: dict  # what it noted before the first round

    @property
    def taus(self):
        return [n["tau"] for n in self.notes if "tau" in n]

    @property
    def values(self):
        return {s: m.vector.tolist() for s, m in self.state.models.items()}


def run(
    made, folder, budget=PLENTY, rounds=50, engine=Loop, between=lambda s, channel: s, **prices
):
    """Rounds until the method has enough: what it noted, the last state, what it spent."""
    made = replace(made, method=replace(made.method, check=None))
    channel, running, plan = opened(made, folder, engine)
    fed, notes = Metered(channel, **prices), []
    channel.begin(0, stage="init")
    state = made.method.init(fed, replace(made.setup(plan.start), budget=budget))
    begun, state, fed.spent = dict(state.notes), replace(state, notes={}), Spent()
    for number in range(rounds):
        channel.begin(number)
        people = cohort(made.settings, number, made.members)
        spent = replace(fed.spent, bytes=channel.state.ledger.total.total)
        info = Round(number, people, made.public, spent, budget)
        state = made.method.round(fed, state, info)
        notes.append(dict(state.notes))
        state = between(replace(state, notes={}), channel)
        if state.over:
            break
    fed.spent = replace(fed.spent, bytes=channel.state.ledger.total.total)
    running.close()
    return Ran(state, notes, fed, channel, made, begun)


# --- what rounds cost -----------------------------------------------------------------------------


def around_trial(method):
    """A run in which clients of two kinds are asked for evidence, or for a trial, in some round."""
    people = [(x, (x[:, i % 2] > 0).long()) for i, x in enumerate(rows())]
    settings = {"engine": "loop", "lr": 0.1, "batch_size": 8, "rounds": 8}
    return coterie.simulate(people, "logistic", method, stop={"bytes": 1e9}, **settings)


def rows():
    return torch.randn(6, 60, 4, generator=torch.Generator().manual_seed(0)).unbind()


def test_a_trials_round_is_not_what_a_round_costs():
    split = around_trial(coterie.methods.make("fedclust+adaptive-tau", {"trial": "always"}))
    moved = {e["round"]: sum(e["bytes"].values()) for e in split.history}
    tried = [e["round"] for e in split.history if "verdict" in e["notes"]]
    costs = split.state.memory[KEY]["costs"]
    *ordinary, _ = [n for n in moved if n not in tried]  # the last one's is known a round later
    assert tried
    assert min(moved[n] for n in tried) > 2 * max(moved[n] for n in ordinary)
    assert costs["rounds"] == len(ordinary)
    assert costs["worst_bytes"] < min(moved[n] for n in tried)
    assert costs["bytes"] < 1.05 * sum(moved[n] for n in ordinary)


# --- estimates by hand ----------------------------------------------------------------------------

UNEVEN = [[1.0], [5.0, 5.0, 5.0]]  # optima 1 and 5, weights 1/4 and 3/4


def test_estimates_by_hand(tmp_path):
    # Round 1: losses at 0 are 1 and 25, mean 19; τ = 1 leads to 0.2 and 1, mean 0.8.
    # Round 2 at 0.8: ρ_i = |w_i + w − 2y|: |0.2 + 0.8 − 2| = 1, |1 + 0.8 − 10| = 8.2, mean 6.4.
    # β = 2. Gradients −0.4 and −8.4, mean −6.4; squares 0.16/4 + 70.56·3/4 − 40.96 = 12.
    # Loss 0.04/4 + 17.64·3/4 = 13.24. One step and two gradients: a third of the work is training.
    ran = run(on_quadratics(adaptive_tau(), UNEVEN), tmp_path, rounds=2)
    first, second = ran.notes
    assert first == {"tau": 1, "loss": pytest.approx(19.0)}
    assert second["rho"] == pytest.approx(6.4, rel=1e-5)
    assert second["beta"] == pytest.approx(2.0, rel=1e-5)
    assert second["delta"] == pytest.approx(math.sqrt(12), rel=1e-5)
    assert second["loss"] == pytest.approx(13.24, rel=1e-5)
    assert ran.state.memory[KEY]["work"] == pytest.approx(1 / 3)


def test_the_next_round_follows_from_them(tmp_path):
    # With ρ = 6.4, β = 2, δ = √12, η = 0.1, φ = 0.025; a step 1 s of R, an exchange b. Measuring
    # was one gradient and then two, 1.5 s a round.
    def g(tau, budget, b):
        b = b + 1.5
        h = math.sqrt(12) / 2 * (1.2**tau - 1) - 0.1 * math.sqrt(12) * tau
        a = (tau + b) / ((budget - b - 1) * tau)
        return a / 0.005 + math.sqrt((a / 0.005) ** 2 + 6.4 * h / (0.0025 * tau)) + 6.4 * h

    for budget, b in ((80, 12.0), (120, 12.0), (60, 1.0), (200, 40.0)):
        ran = run(
            on_quadratics(adaptive_tau(), UNEVEN),
            tmp_path / f"{budget} {b}",
            Budget(seconds=budget),
            rounds=3,
            exchange=b,
        )
        best = min(range(1, 11), key=lambda tau: g(tau, budget, b))
        assert ran.taus == [1, 1, best]
    assert 1 < min(range(1, 11), key=lambda tau: g(tau, 80, 12.0)) < 10  # not an end of the range


@pytest.mark.parametrize(("hidden", "phi", "kind"), [((), 0.025, "convex"), ((12,), 5e-5, "netwo")])
def test_phi_by_the_model_is_that_phi_and_the_notes_say_so(hidden, phi, kind, tmp_path):
    def steps(method, folder):
        people = digits(clients=4, samples=120)
        model = lambda: make_model("mlp", people.shape, people.targets, hidden=hidden)  # noqa: E731
        made = experiment(method, people, model=model, schedule={"momentum": 0.0})
        ran = run(made, tmp_path / folder, Budget(seconds=150), rounds=6, exchange=3.0)
        return ran.begun, ran.taus

    begun, taus = steps(adaptive_tau(), "auto")
    assert begun["phi"] == phi
    assert kind in begun["phi_why"]
    given = {value: steps(adaptive_tau(phi=value), str(value)) for value in (0.025, 5e-5)}
    assert given[phi] == ({"phi": phi, "phi_why": "it was given"}, taus)
    assert given[0.025][1] != given[5e-5][1]  # it matters which


def test_a_learning_rate_that_decays_decays_here_too(tmp_path):
    found = []
    for decay in (1.0, 0.1):
        made = on_quadratics(adaptive_tau(), UNEVEN, schedule={"lr_decay": decay})
        ran = run(made, tmp_path / str(decay), Budget(seconds=80), rounds=3, exchange=12.0)
        found.append(ran.taus[-1])
    assert found[0] < found[1]  # smaller steps drift less


def test_equal_clients_make_more_and_more_steps(tmp_path):
    made = on_quadratics(adaptive_tau(), [[2.0], [2.0], [2.0]])
    ran = run(made, tmp_path, Budget(seconds=1e5), rounds=4)
    assert ran.taus == [1, 10, 100, 100]
    made = on_quadratics(adaptive_tau(gamma=3, tau_max=8), [[2.0], [2.0]])
    assert run(made, tmp_path / "b", Budget(seconds=1e5), rounds=4).taus == [1, 3, 8, 8]


def test_measuring_is_on_so_many_rows_the_same_in_every_round(tmp_path):
    # The loss at 0 over two of the three rows is 5, 32.5 or 36.5, over all 74/3.
    found = {}
    for sample in (2, 3, 0):
        made = on_quadratics(
            adaptive_tau(sample=sample), [[1.0, 3.0, 8.0]] * 4, schedule={"lr": 1e-9}
        )
        ran = run(made, tmp_path / str(sample), rounds=3)
        found[sample] = {round(n["loss"], 3) for n in ran.notes}
        assert len(found[sample]) == 1
    assert found[3] == found[0] == {24.667}
    shares = [(a, b, 4 - a - b) for a in range(4) for b in range(5 - a)]
    mixed = [n for n in shares if max(n) < 4]  # clients draw rows of their own
    assert found[2] <= {round((5 * a + 32.5 * b + 36.5 * c) / 4, 3) for a, b, c in mixed}


def test_groups_share_one_number_of_steps(tmp_path):
    # Groups with optima 0 and 4 (one sample each), and 10 and 10: δ² is 16 in one and 0 in the
    # other, by samples (2 and 6) 4: δ = 2.
    from support import quadratics, with_groups

    people = with_groups(quadratics([[0.0], [4.0], [10.0] * 3, [10.0] * 3]), [0, 0, 1, 1])
    made = on_quadratics(adaptive_steps(coterie.oracle()), [], population=people)
    ran = run(made, tmp_path, rounds=2)
    assert ran.notes[1]["delta"] == pytest.approx(2.0, rel=1e-5)
    assert ran.notes[1]["beta"] == pytest.approx(2.0, rel=1e-5)


# --- the budget -----------------------------------------------------------------------------------

PRICES = [(1.0, 5.0), (1.5, 0.5), (0.01, 3.0), (0.2, 0.1)]


@pytest.mark.parametrize(("step", "exchange"), PRICES)
@pytest.mark.parametrize("seconds", [25.0, 80.0, 133.3])
def test_a_budget_of_seconds_is_used_up_and_never_exceeded(step, exchange, seconds, tmp_path):
    made = on_quadratics(adaptive_tau(), UNEVEN, schedule={"lr": 0.02})
    prices = {"step": step, "exchange": exchange}
    ran = run(made, tmp_path, Budget(seconds=seconds), rounds=5000, **prices)
    assert ran.state.over == f"the budget of {seconds:g} s has no room for another round"
    assert ran.fed.spent.seconds <= seconds
    least = exchange + 3 * step  # a round of one step
    assert ran.fed.spent.seconds >= seconds - 2 * least
    assert ran.fed.asked[-1] == {LOSS}
    assert ran.fed.asked.count({LOSS}) == 1


def test_a_budget_of_bytes_is_used_up_and_never_exceeded(tmp_path):
    made = on_quadratics(adaptive_tau(), UNEVEN)
    first = run(made, tmp_path / "a", rounds=1).fed.spent.bytes
    ran = run(made, tmp_path / "b", Budget(bytes=20 * first), rounds=100)
    assert ran.state.over == f"the budget of {20 * first:g} bytes has no room for another round"
    assert 17 * first <= ran.fed.spent.bytes <= 20 * first


def test_the_tighter_of_two_budgets_counts(tmp_path):
    made = on_quadratics(adaptive_tau(), UNEVEN)
    ran = run(made, tmp_path, Budget(bytes=10**9, seconds=40.0))
    assert ran.state.over == "the budget of 40 s has no room for another round"


def test_the_last_round_is_cut_to_what_fits(tmp_path):
    # Equal clients have nothing to compare, one gradient is all they measure: τ = 1, then 10, then
    # 100. A step is 1 s, an exchange 2 s: 1 + 1 + 2 and 10 + 1 + 2, 17 s of 60. With b = 3 s
    # 17 + (τ + 1) + 6 = 60 has τ = 36. The loss of the last model takes 2⅓ s more.
    ran = run(on_quadratics(adaptive_tau(), [[2.0], [2.0]]), tmp_path, Budget(seconds=60),
              exchange=2.0)  # fmt: skip
    assert ran.taus == [1, 10, 36]
    assert ran.fed.spent.seconds == pytest.approx(17 + 39 + 2 + 1 / 3)


def test_a_budget_that_was_spent_before_ends_the_run_at_once(tmp_path):
    made = on_quadratics(adaptive_tau(), UNEVEN, start=3.0)
    channel, _, plan = opened(replace(made, method=replace(made.method, check=None)), tmp_path)
    fed = Metered(channel)
    state = made.method.init(fed, made.setup(plan.start))
    after = made.method.round(fed, state, Round(0, [0, 1], None, Spent(0, 9.0), Budget(seconds=5)))
    assert after.over == "the budget of 5 s has no room for another round"
    assert fed.asked == []
    assert after.models[0].vector.tolist() == [3.0]


def test_a_run_with_room_for_no_second_round_gives_what_it_has(tmp_path):
    # One round costs 3 s, a step 1 s and the rest 2 s. Of 7 s, 3 + 2·1 + 2·2 = 9 are too many: only
    # the loss is asked for. Of 5 s, 3 + 1 + 2 = 6 are too many for that question too: θ⁰ is the
    # best model whose loss is known.
    made = on_quadratics(adaptive_tau(), [[2.0], [2.0]])
    ran = run(made, tmp_path / "a", Budget(seconds=7))
    assert ran.fed.asked == [{"train"}, {LOSS}]
    assert ran.values[0] == pytest.approx([0.4])
    ran = run(made, tmp_path / "b", Budget(seconds=5))
    assert ran.fed.asked == [{"train"}]
    assert ran.values[0] == [0.0]


# --- the best models ------------------------------------------------------------------------------


def test_the_best_model_is_returned_though_it_was_not_the_last(tmp_path):
    # One step a round, lr 0.1, 0.2, 0.4, 0.8, 1.6, ...: the distance to the common optimum 4 is
    # multiplied by 0.8, 0.6, 0.2, −0.6, −2.2, −5.4: 4, 3.2, 1.92, 0.384, −0.2304, 0.50688, ...
    # Rounds take 3 s, then 4 s. After seven 27 + 2·1 + 2·20/7 are more than 33, after six not yet.
    made = on_quadratics(adaptive_tau(tau_max=1), [[3.0], [5.0]], schedule={"lr_decay": 2.0})
    ran = run(made, tmp_path, Budget(seconds=33))
    assert ran.taus == [1] * 7
    assert ran.values[0] == pytest.approx([4.2304], abs=1e-5)
    assert ran.notes[-1]["best_loss"] == pytest.approx(1 + 0.2304**2, rel=1e-5)
    # The loss noted in a round is that of the model it began with.
    assert ran.notes[4]["loss"] == pytest.approx(ran.notes[-1]["best_loss"])


def test_the_last_model_is_returned_if_it_is_the_best(tmp_path):
    made = on_quadratics(adaptive_tau(tau_max=1), [[3.0], [5.0]])
    ran = run(made, tmp_path, Budget(seconds=33))
    assert ran.values[0] == pytest.approx([4 - 4 * 0.8**7], abs=1e-5)


def test_a_run_that_only_gets_worse_returns_its_start(tmp_path):
    made = on_quadratics(adaptive_tau(), [[3.0], [5.0]], start=3.5, schedule={"lr": 1.1})
    assert run(made, tmp_path, Budget(seconds=30)).values[0] == [3.5]


def test_the_groups_and_memory_of_the_best_models_come_with_them(tmp_path):
    made = on_quadratics(
        adaptive_steps(coterie.fedavgm(momentum=0.1), tau_max=1),
        UNEVEN,
        schedule={"lr_decay": 2.0},
    )
    trained = []

    def note(state, channel):
        if not state.over:
            velocity = state.memory["server"][0]["v"]
            trained.append((state.models[0].vector.item(), velocity.item()))
        return state

    ran = run(made, tmp_path, Budget(seconds=33), between=note)
    found = ran.values[0][0], ran.state.memory["server"][0]["v"].item()
    assert found in trained[:-1]  # one of those trained, and not the last
    assert found[1] != trained[-1][1]


@pytest.mark.parametrize("method", [coterie.scaffold, coterie.feddyn])
def test_the_mean_of_what_clients_keep_does_not_go_back_with_the_models(method, tmp_path):
    # Clients cannot go back: what they keep is that of the last round.
    made = on_quadratics(
        adaptive_steps(method(), tau_max=1), [[1.0], [5.0], [6.0]], schedule={"lr_decay": 2.0}
    )
    trained = []

    def note(state, channel):
        trained.append((state.models[0].vector.item(), state.memory["correction"].item()))
        return state

    ran = run(made, tmp_path, Budget(seconds=33), between=note)
    store = Store(tmp_path, ran.channel.wire.layout)
    keeps = [store.read(c, ran.channel.state.versions[c])["correction"].item() for c in range(3)]
    now = ran.state.memory["correction"].item()
    assert now == pytest.approx(sum(keeps) / 3, rel=1e-5)
    best = {correction for value, correction in trained[:-1] if value == ran.values[0][0]}
    assert len(best) == 1  # the models are of an earlier round, in which it was another one
    assert now not in best


# --- reductions and contracts ---------------------------------------------------------------------

AROUND = {
    "fedavg": coterie.fedavg,
    "fedprox": lambda: coterie.fedprox(mu=0.5),
    "fedper": lambda: coterie.fedper(k=1),
    "ifca": lambda: coterie.ifca(k=2),
    "oracle": coterie.oracle,
    "fedclust": lambda: coterie.fedclust(clusters=2, warmup_epochs=1),
    "ditto": coterie.ditto,
    "per-fedavg": lambda: coterie.per_fedavg(beta=0.1),
    "scaffold": coterie.scaffold,
    "scaffold n": lambda: coterie.scaffold(weights="n"),
    "feddyn": coterie.feddyn,
    "moon": coterie.moon,
    "cfl": lambda: coterie.cfl(eps1=0.42, eps2=0.55, relative=False),
    "apfl": coterie.apfl,
    "pfedme": lambda: coterie.pfedme(inner_steps=2),
    "fedrep": lambda: coterie.fedrep(head_epochs=2),
    "fedavgm": coterie.fedavgm,
    "median": coterie.median,
}
SMALL = {"clients": 4, "samples": 120}


@pytest.mark.parametrize("name", AROUND)
def test_one_step_at_most_is_the_method_with_one_step_to_the_bit(name, tmp_path):
    plain = experiment(AROUND[name](), digits(**SMALL), schedule={"steps": 1})
    state, channel, _ = drive(plain, tmp_path / "a", rounds=3)
    # FedClust's warm-up is a number of steps too, if the run has one.
    steps = {"steps": 1} if name == "fedclust" else {}
    around = experiment(adaptive_steps(AROUND[name](), tau_max=1), digits(**SMALL), schedule=steps)
    ran = run(around, tmp_path / "b", rounds=3)
    assert same_bits(models(plain, state, channel), models(ran.made, ran.state, ran.channel))
    rest = {k: v for k, v in ran.state.memory.items() if k != KEY}
    assert same(rest, dict(state.memory))
    assert ran.notes[1]["beta"] > 0


@pytest.mark.parametrize("name", AROUND)
def test_steps_of_every_method_are_those_that_were_chosen(name, tmp_path):
    made = experiment(adaptive_steps(AROUND[name](), sample=10), digits(**SMALL))
    ran = run(made, tmp_path, Budget(seconds=400), step=0.1, exchange=20.0, rounds=4)
    assert max(ran.taus) > 1
    assert all(n["loss"] > 0 for n in ran.notes)
    assert ran.channel.exposed <= ({"means"} if made.method.sees == "means" else {"means", "each"})


def test_a_method_that_sends_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="fednova sends directions"):
        adaptive_steps(coterie.fednova())
    unknown = replace(coterie.fednova(), name="theirs")  # one that nobody has heard of
    made = experiment(adaptive_steps(unknown), digits(**SMALL))
    with pytest.raises(ConfigError, match="choose another method"):
        run(made, tmp_path, rounds=1)


def small(method=None, **settings):
    inner = method or adaptive_steps(coterie.ifca(k=2), sample=10)
    return experiment(inner, digits(**SMALL), settings=settings)


TIGHT = {"budget": Budget(seconds=120), "step": 0.1, "exchange": 10.0}


def outcome(folder, engine=Loop, between=lambda s, channel: s, **settings):
    ran = run(small(**settings), folder, engine=engine, between=between, **TIGHT)
    assert ran.state.over
    return ran


def saved_and_read(folder):
    def between(state, channel):
        write_tree(folder, state.to_tree(), channel.wire.layout, durable=False)
        return State.from_tree(read_tree(folder, channel.wire.layout))

    return between


def test_saving_and_reading_between_rounds_changes_nothing(tmp_path):
    plain = outcome(tmp_path / "a")
    read = outcome(tmp_path / "b", between=saved_and_read(tmp_path / "state"))
    assert plain.notes == read.notes
    assert same(plain.state.to_tree(), read.state.to_tree())


def test_any_engine_and_order_give_the_same_bits(tmp_path):
    class Reversed(Loop):
        def exchange(self, requests, until=None):
            yield from list(super().exchange(requests[::-1], until))[::-1]

    plain = outcome(tmp_path / "a", cohort=0.75)
    for folder, engine in (("b", Reversed), ("c", lambda plan: Pool(plan, 2))):
        other = outcome(tmp_path / folder, engine, cohort=0.75)
        assert plain.notes == other.notes
        assert same(plain.state.to_tree(), other.state.to_tree())


def test_a_lost_reply_is_as_if_the_order_had_been_lost(tmp_path):
    def hit(client, order):
        return client == 1 and order in ("2.0", "4.0")

    after = outcome(tmp_path / "a", lambda plan: Faulty(Loop(plan), lose_reply=hit))
    before = outcome(tmp_path / "b", lambda plan: Faulty(Loop(plan), lose_order=hit))
    never = outcome(tmp_path / "c")
    assert same(dict(after.state.models), dict(before.state.models))
    assert [n.get("rho") for n in after.notes] == [n.get("rho") for n in before.notes]
    assert [n.get("rho") for n in after.notes] != [n.get("rho") for n in never.notes]


def test_a_client_that_sat_out_compares_with_what_it_sent_last(tmp_path):
    # Client 0 answers in rounds 1 and 3. It sent 0.2·1 = 0.2 then; in round 3 it receives w:
    # after round 1 (0.2 + 1)/2 = 0.6; then client 1 alone: 0.6 + 0.2·4.4 = 1.48.
    # Client 0: |0.2 + 1.48 − 2| = 0.32; client 1, which sent 1.48 itself, has nothing to compare.
    def absent(client, order):
        return client == 0 and order == "2.0"

    made = on_quadratics(adaptive_tau(tau_max=1), [[1.0], [5.0]])
    ran = run(made, tmp_path, rounds=3, engine=lambda p: Faulty(Loop(p), lose_order=absent))
    assert ran.notes[2]["rho"] == pytest.approx(0.32, rel=1e-4)
    assert ran.notes[2]["beta"] == pytest.approx(2.0, rel=1e-4)


def test_nobody_answers(tmp_path):
    def mute(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: True)

    made = on_quadratics(adaptive_tau(), UNEVEN, start=2.0)
    ran = run(made, tmp_path, Budget(seconds=20), engine=mute)
    assert ran.values[0] == [2.0]
    assert set(ran.taus) == {1}
    assert ran.state.over
    assert ran.channel.state.versions == {}


def test_what_travels(tmp_path):
    # A model down; a model, a gradient of its parameters and six float64 up. Last: a number up.
    made = on_quadratics(adaptive_tau(), UNEVEN)
    spy = []

    def engine(plan):
        spy.append(Spy(plan))
        return spy[0]

    ran = run(made, tmp_path, Budget(seconds=16), engine=engine)
    trained = [s for s in spy[0].seen if s.task == "train"]
    asked = [s for s in spy[0].seen if s.task == LOSS]
    assert len(trained) == 2 * len(ran.taus)
    assert len(asked) == 2
    assert {s.payload for s in trained} == {(4, 4 + 4 + 48)}
    assert {s.payload for s in asked} == {(4, 8)}
    assert [s.config["steps"] for s in trained[::2]] == ran.taus
