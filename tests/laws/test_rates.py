"""Every training of every method goes by its round's learning rate."""

import pytest

from coterie.channel.channel import Channel
from coterie.client import client as client_module
from support import ROWS, drive, experiment

PER_FEDAVG_BETA = 0.1  # its row's own outer rate


@pytest.mark.parametrize("name", ROWS)
def test_the_learning_rate_decays_by_round_in_every_training(name, tmp_path, monkeypatch):
    used, stage = [], []
    original, begin = client_module.fit, Channel.begin

    def spy(model, training, criterion):
        used.append((stage[-1], training.schedule.lr))
        return original(model, training, criterion)

    def noted(channel, round, **named):
        stage.append(round)
        return begin(channel, round, **named)

    monkeypatch.setattr(client_module, "fit", spy)
    monkeypatch.setattr(Channel, "begin", noted)
    schedule = {"lr": 0.2, "lr_decay": 0.5}
    drive(experiment(ROWS[name](), schedule=schedule), tmp_path)
    rate = PER_FEDAVG_BETA if name == "per-fedavg" else 0.2
    assert {r for r, _ in used} == {0, 1, 2}
    wanted = {(r, rate * 0.5**r) for r in range(3)}
    # DC-PFL's clients are probed in the second round, from the first model and at its rate.
    assert set(used) == wanted | ({(1, 0.2)} if name == "dc-pfl" else set())
