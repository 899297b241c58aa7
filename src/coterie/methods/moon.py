"""MOON: what a client's model sees in its data stays near to what the global model sees."""

from __future__ import annotations

from coterie.client import Client, Fit, contrastive, erm
from coterie.compose.grouped import grouped
from coterie.compose.local import Local
from coterie.core.method import Method, NonNegative, Positive, Setup, method
from coterie.core.weights import Weights
from coterie.errors import ConfigError

KEY = "previous"  # the client's last own model, in its state


@method
def moon(mu: NonNegative = 1.0, temperature: Positive = 0.5) -> Method:
    """FedAvg whose clients' representations stay near the global and leave their last local ones.

    Family: global.
    Rule: locally + μ·−log[exp(cos(z, z₊)/T) / (exp(cos(z, z₊)/T) + exp(cos(z, z₋)/T))], mean over
    the batch: z the input of the last layer, z₊ that of the model received, z₋ that of the client's
    own model of its last round; then as FedAvg. In a client's first round z₋ = z₊ and the term is
    constant: it is left out.
    Args:
        mu: strength of the term, 0 or more; 0 is FedAvg to the bit.
        temperature: T, above 0; the smaller, the sharper.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: no projection head is added to the model: the representation is the input of its last
    layer. The two other models are run in evaluation mode, their buffers left alone.
    Reference: Li et al., Model-Contrastive Federated Learning, CVPR 2021.
    """

    def train(client: Client, start: Weights) -> Fit:
        before = client.kept(KEY)
        away = None if before is None else before.onto(start)
        result = client.fit(
            start, erm() if away is None else contrastive(mu, temperature, start, away)
        )
        trained = [e.name for e in start.layout.entries if e.kind != "frozen"]
        client.state[KEY] = result.weights.only(trained)
        return result

    def check(setup: Setup) -> None:
        if len(setup.start.layout.layers) < 2:
            raise ConfigError(
                "method moon compares what the layers before the last one make of the data, and "
                "this model has only one layer: choose a deeper model, or another method"
            )

    return grouped("moon", train=Local(train, check=check))
