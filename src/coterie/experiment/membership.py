"""Members of a real federation: who is there, who comes, and who leaves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from coterie.channel.policy import counts
from coterie.channel.tasks import KEEP
from coterie.core.engine import Remote
from coterie.core.events import ARRIVAL
from coterie.core.loop import Event, Observer, failure
from coterie.core.messages import ClientId, Order
from coterie.core.method import Round
from coterie.errors import Interrupted
from coterie.experiment.observers import Record, Saving
from coterie.experiment.session import RunSession

_FAREWELL = 90.0  # seconds for clients that are away to come for their models


@dataclass
class Membership(Observer):
    """Waits for clients before a round, lets new ones in, and hands out models at the end."""

    session: RunSession
    remote: Remote
    record: Record
    saving: Saving
    spared: int = 0

    def before(self, number: int) -> None:
        """Wait for enough clients, and let new ones in."""
        self.welcome(number)
        self.spared = self.remote.spared

    def welcome(self, number: int) -> None:
        """The same, also when all who were there have left before the round could begin."""
        session, method = self.session, self.session.experiment.method
        state, policy = session.channel.state, session.experiment.settings.policy
        self.remote.begin(number)
        admit, closed = method.admit, ""
        if admit is None:
            closed = f"method {method.name} has no way to admit newcomers"
        elif session.plan.privacy.on:  # a budget, or a roster of keys, is of those who began
            closed = "with privacy, it is for those who began it"
        try:
            needed = counts(policy, len(state.members)).least
            fresh = self.remote.arrivals(state.members, needed, closed)
        except Interrupted:  # somebody asked for that while it waited
            self.saving.keep()
            raise
        state.selected = None  # who left since is not asked, and who is back is: choose now
        if fresh and admit is not None:
            self._admit(number, fresh)

    def _admit(self, number: int, fresh: list[ClientId]) -> None:
        """Let the method find places for these."""
        session, run = self.session, self.session.run
        channel, admit = session.channel, session.experiment.method.admit
        assert admit is not None
        channel.begin(max(0, number - 1), stage=f"{number}.admit")
        info = Round(number, fresh, session.experiment.public)
        try:
            run.state = admit(channel, run.state, info)
        except Exception as why:
            if not channel.tolerates(why):
                raise
            self.remote.turn_away(fresh, failure(why))
            return
        came = [c for c in fresh if c in run.state.groups]
        channel.state.members = sorted({*channel.state.members, *came})
        if session.directory is not None:
            session.directory.append_ledger(channel.state.ledger.rows(number + 1))
        groups = [run.state.groups[c] for c in came]
        event: Event = {"round": number + 1, "event": ARRIVAL, "clients": came, "groups": [*groups]}
        self.record.write({**event, **session.left_out()})

    def after(self, event: Event) -> None:
        """Whose answers could not be used is asked anew before the next round."""
        event["spared"] = self.remote.spared - self.spared
        if self.session.channel.phase.rejected:
            self.remote.doubt(self.session.channel.phase.rejected)

    def farewell(self, summary: dict[str, Any]) -> None:
        """It is over: every client keeps the model that it would use now.

        Who is away gets a while to come back for it.
        """
        session, members = self.session, self.session.members
        kept, ends = set(summary.get("kept", [])), time.monotonic() + _FAREWELL
        while left := [c for c in members if c not in kept]:
            orders = [
                Order(c, KEEP, sends, self._last_words(c), unmetered=True)
                for c, sends in session.sends(left).items()
            ]
            kept |= {answer.client for answer in session.channel.exchange(orders)}
            summary["kept"] = sorted(kept)
            if session.directory is not None:
                session.directory.write_result(summary)
            if time.monotonic() > ends:
                break
            if kept < set(members):
                self.remote.arrivals(members, 0, "it is over")
                time.sleep(1)

    def _last_words(self, client: ClientId) -> dict[str, Any]:
        run = self.session.run
        return {"rounds": run.done, "group": str(run.state.groups.get(client, ""))}
