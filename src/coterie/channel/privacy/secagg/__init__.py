"""Secure aggregation: computes the sum of the clients' vectors and reveals nothing else of them.

The protocol of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning" (CCS 2017), secure against an active server by its consistency check, and optionally with
the sparse neighbour graph of Bell et al., "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead" (CCS 2020). A client is a ``Member``, the server a ``Sum``; their
messages are bytes, and this package does not transport them:

========  ==========================================  ===========================================
step      a member sends                              it gets in return
========  ==========================================  ===========================================
1         its fresh keys, signed (``advertise``)      the keys of all members
2         encrypted shares of its secrets             the shares that others made for it
          (``share``)
3         its masked values (``mask``)                the set of survivors
4         its signature of that set (``confirm``)     the signatures of the others
5         the shares that unmask the sum
          (``unmask``)
========  ==========================================  ===========================================

A member may drop out before every step. Constant time is not a goal: the time of Python's big
integers and of comparisons depends on the values, so an attacker on the same machine could learn
from it.
"""

from __future__ import annotations

from coterie.channel.privacy.secagg.frames import Rejected, TooFew
from coterie.channel.privacy.secagg.member import Member
from coterie.channel.privacy.secagg.ring import from_ring, to_ring
from coterie.channel.privacy.secagg.server import Sum
from coterie.channel.privacy.secagg.session import Session

__all__ = ["Member", "Rejected", "Session", "Sum", "TooFew", "from_ring", "to_ring"]
