"""What is done about a run between its rounds, each observer one thing.

``experiment.running`` lists those that have something to do in a run, in order.
"""

from coterie.experiment.observers.checkpoint import Saving
from coterie.experiment.observers.evaluate import Evaluate, Piggyback
from coterie.experiment.observers.membership import Membership
from coterie.experiment.observers.record import Account, Guarding, Progress, Record
from coterie.experiment.observers.stop import GiveUp, Stopping
from coterie.experiment.observers.trouble import Trouble

__all__ = [
    "Account",
    "Evaluate",
    "GiveUp",
    "Guarding",
    "Membership",
    "Piggyback",
    "Progress",
    "Record",
    "Saving",
    "Stopping",
    "Trouble",
]
