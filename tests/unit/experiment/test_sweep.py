"""What a sweep is asked for, which runs that makes, and what is said of their scores."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import coterie
from coterie.errors import ConfigError, DataError
from coterie.experiment.compare import entries as entries_module
from coterie.experiment.compare import jobs
from coterie.experiment.compare.compare import set_up
from coterie.experiment.compare.entries import (
    Populations,
    checked_runs,
    entries_of,
    folder_of,
    more_seeds,
)
from coterie.experiment.compare.jobs import at_once
from coterie.experiment.compare.plan import read_plan, write_plan
from coterie.experiment.compare.sweep import (
    Sweep,
    methods_of,
    of_flags,
    of_table,
    settings_of_sweep,
)
from coterie.experiment.config import Config, parse, population_of
from coterie.results.seeds import common_seeds, deviation, holm, marks, means_of, p_value

QUICK = {"data": {"clients": 4, "samples": 200}, "run": {"rounds": 1}}


def entries(people=None, base=QUICK, **asked):
    def configure(method, assignments):
        return parse(set_up(base, method, assignments))

    sweep = of_table(asked)
    return entries_of(sweep, configure, people or Populations(), not sweep.methods)


# --- how it is written ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"sedes": 5}, "unknown key 'sweep.sedes'; did you mean 'sweep.seeds'"),
        ({"seeds": 0}, "seeds = 0: give their number"),
        ({"seeds": True}, "seeds = True"),
        ({"seeds": "many"}, "give their number, as in 5"),
        ({"seeds": [1, 1]}, "seeds: 1 is given twice"),
        ({"seeds": [1.5]}, "give their number"),
        ({"partitions": [3]}, "give a list of names"),
        ({"partitions": ["iid", "iid"]}, "iid is given twice"),
        ({"vary": {"train.lr": 0.1}}, "give a list of values"),
        ({"vary": {"train.lr": []}}, "give a list of values"),
        ({"vary": {"train.lr": [1, "1"]}}, "1 is given twice"),
        ({"vary": {"rate": [1]}}, "write section.key"),
        ({"vary": {"run.seed": [1]}}, "use the sweep's key seeds instead"),
        ({"vary": {"partition": {"name": ["iid"]}}}, "use the sweep's key partitions instead"),
        ({"vary": {"run.engine": ["loop"]}}, "set it once"),
        ({"vary": [1]}, "must be a table"),
        ({"jobs": 0}, "jobs = 0"),
        (5, "must be a table"),
    ],
)
def test_what_is_wrong_is_said(table, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        of_table(table)


def test_flags_mean_the_same_as_the_table():
    table = {"methods": ["local", "ifca:k=4"], "seeds": [3, 7], "shifts": ["none", "rotation"]}
    table |= {"partitions": ["iid", "dirichlet:alpha=0.1"], "jobs": 2}
    table["vary"] = {"train.lr": [0.05, 0.1], "model": {"hidden": [[8], [8, 8]]}}
    flags = of_flags(
        methods="local,ifca:k=4",
        seeds="3,7",
        shifts="none,rotation",
        partitions="iid, dirichlet:alpha=0.1",
        vary=["train.lr=0.05,0.1", "model.hidden=[8],[8, 8]"],
        jobs=2,
    )
    assert of_table(table) == flags
    assert of_flags(seeds="4").seeds == (0, 1, 2, 3)
    assert of_flags(seeds="4,").seeds == (4,)
    for wrong in (["train.lr"], ["train.lr=1", "train.lr=2"]):
        with pytest.raises(ConfigError, match=r"--vary train\.lr"):
            of_flags(vary=wrong)


def test_flags_win_over_the_file_word_by_word():
    file = of_table({"seeds": 5, "methods": ["local"], "vary": {"train.lr": [1, 2], "a.b": [1]}})
    both = of_flags(seeds="2", vary=["train.lr=7"]).over(file)
    assert (both.seeds, both.methods) == ((0, 1), "local")
    assert both.vary == {"train.lr": (7,), "a.b": (1,)}
    assert both.keys == ["run.seed", "train.lr", "a.b"]
    fixed = both.without(["run.seed", "train.lr"])  # a single value is given for these
    assert (fixed.seeds, fixed.vary) == ((), {"a.b": (1,)})


def test_parameters_of_a_method_are_varied_where_it_has_them():
    asked = Sweep("local,fedprox,fedprox:mu=7,ditto+ifca:ifca.k=2", vary={"method.mu": (0.1, 1)})
    assert [title for title, _, _ in methods_of(asked)] == [
        *["local", "fedprox mu=0.1", "fedprox mu=1", "fedprox mu=7", "ditto+ifca ifca.k=2"],
    ]
    assert asked.plain  # it is the same as writing the methods out
    with pytest.raises(ConfigError, match="none of the methods has a parameter lam"):
        methods_of(Sweep("local,fedprox", vary={"method.lam": (1,)}))
    with pytest.raises(ConfigError, match="twice"):
        methods_of(Sweep("fedprox,fedprox:mu=1", vary={"method.mu": (1,)}))
    every = methods_of(Sweep("local,fedavg", vary={"method.layer_interval": (1, 2)}))
    assert [title for title, _, _ in every] == [  # nothing of local's travels
        *["local", "fedavg layer_interval=1", "fedavg layer_interval=2"]
    ]
    with pytest.raises(ConfigError, match="a name is empty"):
        methods_of(Sweep("local,,fedavg"))


def test_a_method_may_have_training_of_its_own():
    base = {"method": {"name": "ifca", "k": 3}, "train": {"lr": 0.05, "epochs": 2}}
    (asked,) = methods_of(Sweep("scaffold:server_lr=0.5:train.lr=0.01"))
    assert asked[0] == "scaffold server_lr=0.5 train.lr=0.01"
    made = parse(set_up(base, asked, [("train.epochs", 4)]))
    assert (made.train.lr, made.train.epochs) == (0.01, 4)
    assert made.method.parameters == {"server_lr": 0.5}
    plain = parse(set_up(base, ("fedavg", "fedavg", {}), []))
    assert plain.train.lr == 0.05
    with pytest.raises(ConfigError, match=r"vary train\.lr: scaffold .* sets it already"):
        set_up(base, asked, [("train.lr", 0.1)])
    with pytest.raises(ConfigError, match=r"train\.rl.*did you mean"):
        parse(set_up(base, ("scaffold", "scaffold", {"train.rl": 0.01}), []))


# --- the runs that it makes ----------------------------------------------------------------------


def test_every_combination_once_on_the_same_clients():
    people = Populations()
    made = entries(
        people,
        methods=["local", "fedavg"],
        seeds=[3, 7],
        partitions=["iid", "dirichlet:alpha=5"],
        vary={"train.lr": [0.05, 0.1]},
    )
    assert len(made) == len({e.name for e in made}) == len({e.folder for e in made}) == 16
    assert made[0].name == "local, iid, train.lr 0.05, seed 3"
    assert made[0].folder == "local/iid,train.lr=0.05/seed-3"
    assert made[-1].folder == "fedavg/dirichlet-alpha=5,train.lr=0.1/seed-7"
    assert made[-1].config.partition.parameters == {"alpha": 5}
    assert (made[-1].config.run.seed, made[-1].config.train.lr) == (7, 0.1)
    clients = {}
    for e in made:
        key = (e.settings["partition"], e.seed)
        clients.setdefault(key, set()).add(id(people.of(e.config)))
    assert len(clients) == 4
    assert all(len(same) == 1 for same in clients.values())  # methods and rates do not matter
    assert len(set.union(*clients.values())) == 4


def test_a_plain_comparison_is_flat():
    made = entries(methods="local,ifca:k=2")
    assert [(e.name, e.folder, e.seed) for e in made] == [
        ("local", "local", None),
        ("ifca k=2", "ifca-k=2", None),
    ]
    assert [e.folder for e in entries(methods="local", seeds=1)] == ["local/seed-0"]
    own = {**QUICK, "run": {"rounds": 1, "seed": 9}}
    varied = entries(base=own, methods="local", vary={"train.lr": [1, 2]})
    assert [e.folder for e in varied] == ["local/train.lr=1/seed-9", "local/train.lr=2/seed-9"]


def test_two_runs_never_share_a_folder():
    titles = ["x:a=K", "x:a=k", "x:a=k-2", "x:a=K K", "x:a=K/K"]

    def configure(method, assignments):
        return parse(set_up(QUICK, (method[0], "local", {}), assignments))

    sweep = Sweep(",".join(titles), seeds=(0, 1))
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries_module, "method_of", lambda config: coterie.local())
        made = entries_of(sweep, configure, Populations())
    folders = [e.folder.casefold() for e in made]
    assert len(set(folders)) == len(folders) == 10
    assert all(len(Path(f).parts) == 2 and ".." not in f for f in folders)
    assert len(folder_of("x" * 500)) < 150
    assert folder_of("x" * 500) != folder_of("x" * 501)
    assert folder_of("..") not in ("", ".", "..")


def test_everything_is_checked_before_anything_runs():
    with pytest.raises(ConfigError, match=r"unknown key 'train\.rl'; did you mean"):
        entries(methods="local", vary={"train.rl": [1]})
    with pytest.raises(ConfigError, match="did you mean 'fedavg'"):
        entries(methods="local,fedagv", seeds=2)
    people = Populations()
    with pytest.raises((ConfigError, DataError), match="dirichlet"):
        checked_runs(
            entries(people, methods="local", partitions=["iid", "dirichelt"]), people, print
        )
    made = entries(people, methods="local,oracle", shifts=["rotation:groups=2", "none"])
    with pytest.raises(ConfigError, match=r"oracle, shift none, seed 0: .*known groups"):
        checked_runs(made, people, print)
    usual = entries(people, shifts=["rotation:groups=2", "none"])
    assert [e.settings["shift"] for e in usual if e.title == "oracle"] == ["rotation groups=2"]


def test_all_methods_are_left_out_by_setting():
    people, told = Populations(), {}
    every = entries(people, methods="all", seeds=2, shifts=["none", "rotation:groups=2"])
    kept, left_out = checked_runs(every, people, told.__setitem__)
    assert told == left_out
    assert "oracle, shift none" in left_out
    assert not [e for e in kept if e.row == "oracle, shift none"]
    assert len([e for e in kept if e.title == "oracle"]) == 2
    assert {e.title for e in kept if e.config.method.name == "ifca"} == {"ifca k=4", "ifca k=2"}


def test_further_seeds_are_like_those_that_there_are():
    made = entries(methods="local,fedavg", seeds=2, partitions=["iid"])
    more = more_seeds(made, range(4))
    assert [(e.folder, e.config.run.seed) for e in more] == [
        ("local/iid/seed-2", 2),
        ("fedavg/iid/seed-2", 2),
        ("local/iid/seed-3", 3),
        ("fedavg/iid/seed-3", 3),
    ]
    with pytest.raises(ConfigError, match="start a new one with --seeds"):
        more_seeds(entries(methods="local"), [1])


def test_clients_are_kept_only_as_far_as_there_is_room():
    configs = [parse({**QUICK, "run": {"seed": seed}}) for seed in range(3)]
    few = Populations(room=1)
    one = few.of(configs[0])
    assert few.of(configs[0]) is one
    few.of(configs[1])
    assert few.of(configs[0]) is not one  # there was room for one
    many = Populations()
    kept = [many.of(c) for c in configs]
    assert [many.of(c) for c in configs] == kept
    many.forget(configs[0])
    assert many.of(configs[0]) is not kept[0]
    same = many.of(configs[0]).clients[0].train.x
    assert same.equal(population_of(configs[0]).clients[0].train.x)


def test_so_many_runs_at_a_time(monkeypatch):
    monkeypatch.setattr(jobs, "available_cores", lambda: 8)
    pool = Config().run
    assert at_once(None, 20, False, pool) == 8
    assert at_once(None, 3, False, pool) == 3
    assert at_once(None, 0, False, pool) == 1
    assert at_once(5, 20, False, pool) == 5
    assert at_once(None, 20, True, pool) == 1  # an engine was asked for
    assert at_once(None, 20, True, replace(pool, workers=3)) == 2
    assert at_once(None, 20, True, replace(pool, workers=9)) == 1
    assert at_once(None, 20, True, replace(pool, engine="loop")) == 1
    assert at_once(None, 20, False, replace(pool, device="cuda")) == 1
    with pytest.raises(ConfigError, match="need Linux"):
        at_once(2, 20, False, replace(pool, device="cuda"))


def test_a_key_that_a_partition_says_itself_is_not_varied():
    for word, text in (("partition", "dirichlet:alpha=0.1"), ("shift", "rotation:groups=2")):
        own = text.split(":")[1].split("=")[0]
        wrong = {f"{word}s": ["none", text], "vary": {f"{word}.{own}": [1, 2]}}
        with pytest.raises(ConfigError, match=rf"vary {word}\.{own}: .* sets {own} already"):
            list(settings_of_sweep(of_table(wrong)))
    fine = of_table({"partitions": ["dirichlet"], "vary": {"partition.alpha": [1, 2]}})
    assert len(list(settings_of_sweep(fine))) == 2


def test_values_that_are_the_same_are_refused():
    with pytest.raises(ConfigError, match=r"train\.lr 1 and train\.lr 1\.0 are the same"):
        entries(methods="local", vary={"train.lr": [1, 1.0]})
    both = entries(methods="local", vary={"run.cohort": [1, 1.0]})  # one client, and all of them
    assert len(both) == 2


def test_the_files_parameters_are_those_of_the_method_that_it_names():
    base = {**QUICK, "method": {"name": "fedprox", "mu": 7, "layer_interval": 2}}
    made = entries(base=base, methods="fedprox,fedprox:mu=1,ditto,fedavg")
    assert [e.config.method.parameters.get("mu") for e in made] == [7, 1, None, None]
    assert [e.config.method.layer_interval for e in made] == [2] * 4
    assert made[0].title == "fedprox"
    nameless = {**QUICK, "method": {"layer_share": 0.5}}  # fedavg is the usual one
    assert entries(base=nameless, methods="fedavg")[0].config.method.layer_share == 0.5


def test_what_is_wrong_for_all_has_no_name_of_a_run():
    people = Populations()
    lost = {"data": {"set": "mnist", "folder": "/nowhere"}}
    made = entries(people, lost, methods="local", seeds=2, partitions=["iid", "dirichlet:alpha=1"])
    with pytest.raises(DataError, match=r"^(?!.*(seed 0|iid)).*/nowhere"):
        checked_runs(made, people, print)
    made = entries(people, methods="local", seeds=2, partitions=["iid", "dirichlet:alpha=-1"])
    with pytest.raises((ConfigError, DataError), match=r"^dirichlet alpha=-1: "):
        checked_runs(made, people, print)


def test_settings_are_all_combinations():
    found = list(
        settings_of_sweep(Sweep(shifts=("none", "rotation:groups=2"), vary={"a.b": (1, 2, 3)}))
    )
    assert len(found) == 6
    assert found[4] == (
        {"shift": "rotation groups=2", "a.b": 2},
        [("shift.name", "rotation"), ("shift.groups", 2), ("a.b", 2)],
    )


# --- means, and who is as good as the best -------------------------------------------------------


def by_hand(gaps):
    """The two-sided p of a paired t-test, by integrating Student's density."""
    n = len(gaps)
    mean = sum(gaps) / n
    var = sum((g - mean) ** 2 for g in gaps) / (n - 1)
    t, df = abs(mean) / math.sqrt(var / n), n - 1
    constant = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    steps = 200_000
    width = t / steps
    inside = sum((1 + ((i + 0.5) * width) ** 2 / df) ** (-(df + 1) / 2) for i in range(steps))
    return 1 - 2 * constant * inside * width


def test_the_paired_test_is_students():
    best, other = [0.9, 0.8, 0.85, 0.7, 0.95], [0.8, 0.82, 0.8, 0.6, 0.9]
    gaps = [a - b for a, b in zip(best, other, strict=True)]
    assert p_value(other, best) == pytest.approx(by_hand(gaps), abs=1e-6)
    assert p_value(best, best) == 1
    # The same difference in every seed, up to rounding: no doubt, and no division by zero.
    shifted = [score - 0.1 for score in best]
    assert p_value(shifted, best) == 0
    assert p_value([0.1 + 0.2] * 5, [0.3] * 5) == 1


def test_holm_steps_down():
    # 0.05/4, 0.05/3, 0.05/2, 0.05/1: the third fails, and so does the fourth, though 0.045 < 0.05.
    tests = {"a": 0.012, "b": 0.0166, "c": 0.026, "d": 0.045}
    assert holm(tests) == {"a", "b"}
    assert holm({"d": 0.045}) == {"d"}
    assert holm({}) == set()


def seeds(*values):
    return dict(enumerate(values))


def test_marks_of_five_seeds():
    best = seeds(0.90, 0.80, 0.85, 0.70, 0.95)
    scores = {
        "best": best,
        "same": dict(best),
        "near": seeds(0.91, 0.78, 0.86, 0.68, 0.95),  # sometimes better
        "always": {s: v - 0.01 for s, v in best.items()},  # a little worse, each time
        "bad": seeds(0.5, 0.4, 0.45, 0.35, 0.5),
        "short": {s: v - 0.2 for s, v in best.items() if s < 4},  # one failed: too few
        "never": {},
    }
    assert marks(scores) == {
        "best": "best",
        "same": "best",
        "near": "tie",
        "always": "worse",
        "bad": "worse",
        "short": "untested",
        "never": "",
    }


def test_marks_are_corrected_for_their_number():
    best = seeds(0.9, 0.9, 0.9, 0.9, 0.9)
    doubtful = seeds(0.86, 0.88, 0.89, 0.86, 0.89)
    alone = p_value(list(doubtful.values()), list(best.values()))
    assert 0.05 / 3 < alone < 0.05
    assert marks({"best": best, "doubtful": doubtful})["doubtful"] == "worse"
    more = {"x": seeds(0.8, 1, 0.9, 0.85, 0.9), "y": seeds(0.9, 0.95, 0.8, 0.9, 0.9)}
    assert marks({"best": best, "doubtful": doubtful, **more})["doubtful"] == "tie"


def test_below_five_seeds_only_the_best_is_marked():
    few = {"a": seeds(0.9, 0.9, 0.9, 0.9), "b": seeds(0.1, 0.1, 0.1, 0.1)}
    assert marks(few) == {"a": "best", "b": ""}


def test_who_does_better_on_common_seeds_is_not_worse():
    # "lucky" lacks the hard seed, and so has the best mean; on the others it is beaten.
    others = dict.fromkeys(range(5), 0.8)
    lucky = dict(others)
    steady = dict.fromkeys(range(5), 0.81) | {5: 0.0}
    assert marks({"lucky": lucky, "steady": steady}) == {"lucky": "worse", "steady": "best"}
    few = {"lucky": {0: 0.8, 1: 0.8}, "steady": {0: 0.81, 1: 0.81, 2: 0.0}}
    assert marks(few) == {"lucky": "", "steady": "best"}
    # One seed in common is none to choose by: then each is judged by all that it has.
    assert marks({"a": {0: 0.8, 1: 0.2}, "b": {0: 0.7}}) == {"a": "", "b": "best"}
    assert common_seeds({"a": {0: 0.8, 1: 0.2}, "b": {0: 0.7}}) is None
    assert common_seeds({"a": {4: 0.8}, "b": {4: 0.7}, "never": {}}) == [4]


def test_what_differs_by_rounding_is_as_good():
    scores = {"a": {0: 0.1 + 0.2}, "b": {0: 0.3}}
    assert scores["a"] != scores["b"]
    assert marks(scores) == {"a": "best", "b": "best"}


def swept_row(method, seed, **more):
    return {"method": method, "seed": seed, "received": 0.5, **more}


def test_who_finds_a_single_group_agrees_by_chance():
    found = {"a": (1.0, None, 0.5), "b": (None, None, None), "c": (1.0, 0.0, -0.4)}
    rows = [swept_row(m, s, agreement=v) for m, own in found.items() for s, v in enumerate(own)]
    told = {row["method"]: row["agreement"] for row in means_of(rows, [])}
    assert told == {"a": 0.5, "b": None, "c": pytest.approx(0.2)}  # (1 + 0 + 0.5) / 3


def test_a_target_that_not_all_reached():
    rows = [swept_row("a", s, target_round=r) for s, r in enumerate((2, None, None))]
    rows += [swept_row("b", s, target_round=r) for s, r in enumerate((4, 6, 5))]
    rows += [swept_row("c", s, target_round=None) for s in range(3)]
    told = {r["method"]: (r["target_round"], r["target_reached"]) for r in means_of(rows, [])}
    assert told == {"a": (2, 1), "b": (5, 3), "c": (None, 0)}
    assert "target_reached" not in means_of([swept_row("a", 0)], [])[0]


def test_a_setting_with_few_seeds_is_untested_where_others_are():
    rows = [swept_row(m, s, lr=1) for m in "ab" for s in range(5)]
    rows += [swept_row(m, s, lr=2, received=r) for m, r in (("a", 0.5), ("b", 0.4)) for s in (0, 1)]
    marked = [row["received_mark"] for row in means_of(rows, ["lr"])]
    assert marked == ["best", "best", "best", "untested"]


def test_means_by_hand():
    rows = [
        {"method": m, "seed": s, "train.lr": lr, "received": r, "adapted": None, "worst": r / 2,
         "gain": g, "groups": n, "bytes": 100 * n, "seconds": 2.0, "sees": "means"}
        for m, s, lr, r, g, n in [
            ("local", 0, 0.1, 0.5, None, 4),
            ("local", 1, 0.1, 0.7, None, 4),
            ("fedavg", 0, 0.1, 0.8, 0.3, 1),
            ("fedavg", 1, 0.1, 0.6, -0.1, 2),
            ("fedavg", 0, 0.2, 0.4, None, 1),
        ]
    ]  # fmt: skip
    local, fedavg, other = means_of(rows, ["train.lr"])
    assert (local["received"], local["seeds"], local["gain"]) == (pytest.approx(0.6), 2, None)
    assert local["received_std"] == pytest.approx(math.sqrt(0.02))  # (0.1² + 0.1²) / (2 - 1)
    assert (local["received_mark"], fedavg["received_mark"]) == ("", "best")
    assert fedavg["received"] == pytest.approx(0.7)
    assert (fedavg["gain"], fedavg["gain_std"]) == (pytest.approx(0.1), pytest.approx(0.2 * 2**0.5))
    assert (fedavg["groups"], fedavg["bytes"]) == (1.5, 150)
    assert fedavg["adapted"] is fedavg["adapted_std"] is None
    assert (other["train.lr"], other["received"], other["received_std"]) == (0.2, 0.4, None)
    assert other["received_mark"] == "best"  # of its own block
    assert "epsilon" not in other
    assert deviation([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx(math.sqrt(32 / 7))


def test_a_plan_is_read_as_it_was_written(tmp_path):
    made = entries(
        methods="local,ifca:k=2",
        seeds=[5],
        partitions=["iid", "dirichlet:alpha=0.1"],
        vary={"run.cohort": [1, 1.0], "model.hidden": [[8], [8, 8]]},  # one client is not all
    )
    write_plan(tmp_path, made, {"x, iid": "it refused"}, engine_asked=False)
    found, left_out, engine_asked = read_plan(tmp_path)
    assert [e.config.model_dump_json() for e in found] == [e.config.model_dump_json() for e in made]
    assert [e.name for e in found] == [e.name for e in made]
    assert [(e.folder, e.seed, e.optional) for e in found] == [
        (e.folder, e.seed, e.optional) for e in made
    ]
    assert (left_out, engine_asked) == ({"x, iid": "it refused"}, False)
