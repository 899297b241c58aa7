"""Objects introduce themselves in a few lines: counts, names and scores, never data or weights."""

import re
from dataclasses import replace

import pytest
import torch

import coterie
from coterie.errors import ConfigError
from coterie.results.comparison import Comparison

MARK = 0.73519  # a value of the data, of every weight and of a name that must not be printed


@pytest.fixture(scope="module")
def result():
    generator = torch.Generator().manual_seed(0)
    people = []
    for _ in range(60):
        x = torch.randn(30, 4, generator=generator)
        x[:, 3] = MARK
        people.append((x, (x[:, 0] > 0).long()))
    return coterie.simulate(people, "logistic", coterie.ifca(k=2), 2, engine="loop")


@pytest.fixture(scope="module")
def comparison():
    quick = {"data": {"clients": 4, "samples": 200}, "run": {"rounds": 1, "engine": "loop"}}
    return coterie.compare(quick, methods=["local", "fedavg"], seeds=2)


def few_lines(text, most=12):
    assert len(text.splitlines()) <= most
    assert max(map(len, text.splitlines())) <= 220
    assert "tensor" not in text
    assert str(MARK)[:6] not in text
    return text


def test_a_result_and_what_is_read_of_it(result):
    for shown in (repr(result), str(result), repr(result._read())):
        text = few_lines(shown)
        assert "ifca, 2 rounds, 60 clients" in text
        assert f"{100 * result.accuracy:.1f} %" in text


def test_a_result_in_a_folder_names_it(tmp_path):
    people = [(torch.randn(20, 3), torch.randn(20)) for _ in range(3)]
    made = coterie.simulate(people, "logistic", rounds=1, engine="loop", directory=tmp_path / "a")
    for text in (repr(made), repr(coterie.read_run(tmp_path / "a"))):
        assert str(tmp_path / "a") in text
        assert "R²" in text


def test_a_method_and_its_parameters():
    assert "ifca(k=3)" in few_lines(repr(coterie.ifca(k=3)))
    many = coterie.known_groups(groups={c: f"site {c}" for c in range(5000)})
    few_lines(repr(many))
    card = coterie.ifca(k=3)._repr_html_()
    assert "k = 3" in card
    assert "fits its training data best" in card
    inside = replace(coterie.fedavg(), source=None, name="<script>")
    assert "<script>" not in inside._repr_html_()


def test_a_population_its_clients_and_their_splits(result):
    population = result.plan.population
    text = few_lines(repr(population))
    assert "60 clients, 1,800 samples, 30 each" in text
    assert "2 classes" in text
    client = population.clients[0]
    assert "'0'" in few_lines(repr(client), 1)
    assert f"{len(client.train)} samples of shape (4,)" in few_lines(repr(client.train), 1)
    card = population._repr_html_()
    assert card.count("<svg") == 30
    assert "… 30 more" in card
    assert str(MARK)[:6] not in card
    wide = sum(float(w) for w in re.findall(r'<rect x="[\d.]+" y="2" width="([\d.]+)"', card))
    counts = [len(c.train) for c in population.clients]
    assert wide == pytest.approx(304 * sum(counts[:30]) / max(counts), rel=0.01)


def test_weights(result):
    few_lines(repr(result.weights(0)), 1)


def test_a_comparison(comparison):
    text = few_lines(repr(comparison))
    assert "2 methods, 4 runs, 2 seeds" in text
    for row in comparison.means:
        assert f"{100 * row['received']:.1f} %  {row['method']}" in text
    html = comparison._repr_html_()
    assert "<table>" in html
    assert html.count("<circle") == 2 * (2 + 1)  # a dot for each run, a ring for each method


def test_a_comparison_draws_its_runs_also_if_they_are_not_kept(comparison):
    assert comparison.directory is None
    drawn = comparison.figure("cost")
    assert {each.name for each in drawn.data} >= {"local"} or len(drawn.data) >= 2
    assert comparison.figure("compare-cost").to_dict() == drawn.to_dict()
    with pytest.raises(ConfigError, match="did you mean 'compare-cost'"):
        comparison.figure("compare-cots")
    with pytest.raises(ConfigError, match="nothing to draw"):
        Comparison([], "accuracy").figure()


def test_a_comparison_writes_its_report(comparison, tmp_path):
    assert comparison.report(tmp_path / "both.html").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="name a file"):
        comparison.report()
