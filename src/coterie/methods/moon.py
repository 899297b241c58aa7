"""MOON: a client's representation of its data stays near that of the global model."""

from __future__ import annotations

from coterie.client import Client, Fit, contrastive, erm
from coterie.compose.grouped import grouped
from coterie.compose.local import Local
from coterie.core.method import Method, NonNegative, Positive, Setup, method
from coterie.core.weights import Weights
from coterie.errors import ConfigError

KEY = "previous"  # the key of the client's own last model, in its state


@method
def moon(mu: NonNegative = 1.0, temperature: Positive = 0.5) -> Method:
    """FedAvg with a contrastive loss: representations stay near the global model's.

    Family: global.
    Rule: a client minimises its loss + μ·−log[exp(cos(z, z₊)/T) / (exp(cos(z, z₊)/T) + exp(cos(z,
    z₋)/T))], averaged over the batch, where z is the input of the last layer, z₊ is that of the
    model received, and z₋ is that of the client's own model of its last round; the rest is as in
    FedAvg. In a client's first round z₋ = z₊, so the term is constant and is left out.
    Args:
        mu: strength μ of the term, 0 or more; 0 is FedAvg to the bit.
        temperature: T, above 0; a smaller value makes differences between the similarities count
            more.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: no projection head is added to the model: the representation is the input of its last
    layer. The two other models run in evaluation mode, so their buffers do not change.
    Reference: Li et al., Model-Contrastive Federated Learning, CVPR 2021.
    """

    def train(client: Client, start: Weights) -> Fit:
        last = client.kept(KEY)
        previous = None if last is None else last.onto(start)
        result = client.fit(
            start, erm() if previous is None else contrastive(mu, temperature, start, previous)
        )
        trained = [e.name for e in start.layout.entries if e.kind != "frozen"]
        client.state[KEY] = result.weights.only(trained)
        return result

    def check(setup: Setup) -> None:
        if len(setup.start.layout.layers) < 2:
            raise ConfigError(
                "method moon compares the inputs of the last layer, and this model has only one "
                "layer: choose a deeper model, or another method"
            )

    return grouped("moon", train=Local(train, check=check))
