"""Compression's stage: arrays are coded on their way, and both halves know what the other holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from coterie.channel.compression.coding import (
    HELD,
    SENT,
    Coded,
    Coding,
    decode,
    encode,
    now_held,
    reference_of,
)
from coterie.channel.exchange import Exchange, Outgoing, Stage, Terms
from coterie.channel.messages import ReplyBody
from coterie.channel.state import ChannelState
from coterie.channel.tasks import kind_of
from coterie.channel.wire import Decoded, Wire
from coterie.core.messages import Array, Upload
from coterie.core.weights import Weights
from coterie.errors import TrainingError, WireError
from coterie.seeds import seed_for

if TYPE_CHECKING:
    from coterie.client import Client

Memo = dict[tuple[Any, ...], Any]  # what many clients are sent is coded once


@dataclass
class Compression(Stage):
    """The server's half: codes what is sent, as a change of what each client holds."""

    wire: Wire
    terms: Terms
    state: ChannelState

    def outward(self, exchange: Exchange) -> None:
        """Code the arrays of all orders."""
        memo, decoded = Memo(), Decoded()
        for out in exchange.outgoing.values():
            for one in (out, out.score):
                if one is not None:
                    self._code(exchange, one, memo, decoded)

    def _code(self, exchange: Exchange, out: Outgoing, memo: Memo, decoded: Decoded) -> None:
        """What travels of an order's arrays, what the client makes of it, what it then holds."""
        side, start, order = self.terms.coding.downwards, self.terms.start, out.order
        if side.plainly or start is None:
            return
        held, layout = self.state.held.get(order.client, {}), self.wire.layout
        models = (
            [] if side.exact else [n for n, a in order.arrays.items() if isinstance(a, Weights)]
        )
        references = {name: reference_of(held.get, name, start) for name in models}
        # Whatever is scored, fetched or kept after a round is the same model.
        stream = exchange.name if kind_of(order.task).trains else "score"
        seed = seed_for(self.terms.seed, "codec", out.round, stream=stream)
        key = (
            seed,
            tuple((n, id(a)) for n, a in order.arrays.items()),
            tuple(map(id, references.values())),
        )
        if key not in memo:
            coded = encode(
                side, order.arrays, references, lambda name: seed_for(seed, name), layout
            )
            packed = self.wire.pack({"arrays": coded.arrays}, exchange.encoded, coded.choices)
            arrives = self.wire.unpack(packed, decoded)["arrays"]
            found = decode(arrives, references, layout)
            now = {} if side.exact else now_held(found, references)
            # What the memo's keys are made of must live as long as the memo.
            memo[key] = coded, found, now, (dict(order.arrays), references)
        out.coded, out.received, out.held, _ = memo[key]

    def arrays(self, out: Outgoing, body: ReplyBody) -> dict[str, Array]:
        """The arrays of a reply as the client meant them."""
        delta_of, start, client = body.get("since", {}), self.terms.start, out.order.client
        references: dict[str, Array | None] = {}
        for name, of in delta_of.items():
            if of == SENT:
                known = self.state.held.get(client, {})
                references[name] = known.get(f"{SENT}.{name}", start)
            else:
                references[name] = out.received[of] if of else None
        arrays = decode(body["arrays"], references, self.wire.layout)
        for name, of in delta_of.items():
            if of == SENT:
                sent, last = arrays[name], references[name]
                if not isinstance(sent, Weights) or not isinstance(last, Weights):
                    raise TrainingError(
                        f"its '{name}' is said to be the change of a model, but is not"
                    )
                whole = sent.onto(last)
                out.held = {**out.held, f"{SENT}.{name}": whole}
        return arrays


@dataclass(frozen=True)
class ClientCompression:
    """The client's half: lays changes upon what it holds, and codes what it sends."""

    coding: Coding
    wire: Wire
    seed: int

    def received(self, client: Client, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """The arrays of an order; a change is one of the model that the client holds, or of θ⁰."""
        if self.coding.downwards.exact:
            if any(isinstance(a, Mapping) and "change" in a for a in arrays.values()):
                raise WireError("an order with a change of a model, where whole models are sent")
            received = decode(arrays, {}, self.wire.layout)
        else:
            received = decode(arrays, self._references(client, arrays), self.wire.layout)
        for name, array in received.items():
            if isinstance(array, Weights) and array.vector.dtype != torch.float32:
                kind = str(array.vector.dtype).removeprefix("torch.")
                raise WireError(f"the model '{name[:100]}' has {kind} numbers, and not float32")
        return received

    def _references(self, client: Client, names: Iterable[str]) -> dict[str, Weights]:
        """What models of these names are changes of."""
        return {
            n: reference_of(lambda m: client.kept(f"{HELD}.{m}"), n, client.base) for n in names
        }

    def hold(self, client: Client, arrays: Mapping[str, Array]) -> None:
        """Keep models as received, if the next ones are to be changes of these."""
        if self.coding.downwards.exact:
            return
        for name, model in now_held(arrays, self._references(client, arrays)).items():
            client.state[f"{HELD}.{name}"] = model

    def code(
        self, client: Client, upload: Upload, received: Mapping[str, Array], order: str
    ) -> Coded:
        """What travels of an upload: changes of what was received, where a codec is lossy."""
        side, whole = self.coding.upwards, self.wire.layout
        if side.plainly:
            return Coded(dict(upload.arrays))
        root = seed_for(self.seed, "codec", client.round, client.id, order)

        def seed(stream: str) -> int:
            return seed_for(root, stream)

        references = {
            name: received[of] if of else None
            for name, of in upload.delta_of.items()
            if not of or of in received
        }
        delta_of = {name: upload.delta_of[name] for name in references}
        model = upload.arrays.get("model")
        if "model" in references or side.exact or not isinstance(model, Weights):
            coded = encode(side, upload.arrays, references, seed, whole, client.state)
            return replace(coded, delta_of=delta_of)
        # A model that is no change of one received is one of the model last sent, as it arrived.
        last = client.kept(f"{SENT}.model") or client.base
        coded = encode(side, upload.arrays, {**references, "model": last}, seed, whole)
        packed = self.wire.pack({"arrays": coded.arrays}, coded.payloads, coded.choices)
        arrived = decode(self.wire.unpack(packed)["arrays"], {"model": last}, whole)["model"]
        assert isinstance(arrived, Weights)
        client.state[f"{SENT}.model"] = arrived.onto(last)
        return replace(coded, delta_of={**delta_of, "model": SENT})
