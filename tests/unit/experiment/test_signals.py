"""A stop ends the block that was asked to stop, and nothing that comes later."""

import os
import signal

import pytest

import coterie
from coterie.experiment.signals import stoppable


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_comparison_after_a_stop_is_not_stopped(tmp_path):
    with pytest.raises(KeyboardInterrupt), stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
    config = {"data": {"clients": 3, "samples": 90}, "run": {"rounds": 1}}
    compared = coterie.compare(config, methods=["local", "fedavg"], jobs=2, directory=tmp_path)
    assert len(compared.rows) == 2
