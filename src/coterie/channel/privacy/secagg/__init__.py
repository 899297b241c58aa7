"""Secure aggregation: the sum of what clients hold, and nothing else of any of them.

The protocol of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning" (CCS 2017), secure against an active server by its consistency check, and optionally with
the sparse neighbour graph of Bell et al., "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead" (CCS 2020). A client is a ``Member``, the server a ``Sum``; they speak
bytes, and who carries these is not known here:

========  ==========================================  ===========================================
step      a member sends                              it gets in return
========  ==========================================  ===========================================
1         its fresh keys, signed (``advertise``)      everybody's keys
2         shares of its secrets, sealed (``share``)   the shares that others dealt to it
3         its masked values (``mask``)                who survived
4         its signature of that set (``confirm``)     the signatures of the others
5         the shares that unmask the sum
          (``unmask``)
========  ==========================================  ===========================================

A member may be lost before every step. Not a goal: constant time. Big integers of Python and the
comparison of messages take as long as they take, so a machine shared with an attacker is not safe.
"""

from __future__ import annotations

from coterie.channel.privacy.secagg.frames import Rejected, TooFew
from coterie.channel.privacy.secagg.member import Member
from coterie.channel.privacy.secagg.ring import from_ring, to_ring
from coterie.channel.privacy.secagg.server import Sum
from coterie.channel.privacy.secagg.session import Session

__all__ = ["Member", "Rejected", "Session", "Sum", "TooFew", "from_ring", "to_ring"]
