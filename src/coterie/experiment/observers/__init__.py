"""What is done about a run between its rounds, each observer one thing.

They are told in this order; a real federation has ``Membership`` besides.
"""

from coterie.experiment.observers.account import Account
from coterie.experiment.observers.checkpoint import Saving
from coterie.experiment.observers.evaluate import Evaluate, Piggyback
from coterie.experiment.observers.membership import Membership
from coterie.experiment.observers.progress import Progress
from coterie.experiment.observers.record import Record
from coterie.experiment.observers.stop import GiveUp, Stopping

__all__ = [
    "Account",
    "Evaluate",
    "GiveUp",
    "Membership",
    "Piggyback",
    "Progress",
    "Record",
    "Saving",
    "Stopping",
]
