"""What is done about a run between its rounds, each observer one thing.

They are told in this order; a real federation has ``Membership`` besides.
"""

from coterie.run.observers.account import Account
from coterie.run.observers.checkpoint import Saving
from coterie.run.observers.evaluate import Evaluate, Piggyback
from coterie.run.observers.membership import Membership
from coterie.run.observers.progress import Progress
from coterie.run.observers.record import Record
from coterie.run.observers.stop import GiveUp, Stopping

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
