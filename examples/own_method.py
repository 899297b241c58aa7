"""A method of your own: a rule that turns the clients' replies into the next model."""

import torch

import coterie
from coterie import Method, Order, State, Upload, Weights, method


@method
def middle() -> Method:
    """The coordinate-wise median of the models that clients send."""

    def init(fed, setup):  # on the server, once: all clients begin with the same model
        return State({0: setup.start}, dict.fromkeys(setup.clients, 0))

    def train(client, arrays, config):  # on a client: train the received model and send it back
        return Upload({"model": client.fit(arrays["model"]).weights}, delta_of={"model": "model"})

    def round(fed, state, info):  # on the server, in each round
        model = state.models[0]
        replies = fed.gather([Order(c, "train", {"model": model}) for c in info.cohort])
        if not replies:  # replies get lost; a method must live with that
            return state
        rows = torch.stack([r.arrays["model"].vector for r in replies])
        return State({0: Weights(model.layout, rows.median(dim=0).values)}, state.groups)

    return Method(
        name="middle",
        init=init,
        round=round,
        tasks={"train": train},
        sends=lambda state, client: {"model": state.models[0]},
        assemble=lambda client, arrays: arrays["model"],
        sees="each",  # gather() shows single replies to the server, and the report says so
    )


# Ten clients with one rule, two of which have all labels the wrong way round.
torch.manual_seed(0)
rule = torch.randn(8)
clients = []
for client in range(10):
    x = torch.randn(100, 8)
    y = (x @ rule > 0).long()
    clients.append((x, 1 - y if client < 2 else y))

for chosen in ("fedavg", middle()):
    result = coterie.simulate(clients, model="logistic", method=chosen, rounds=10, lr=0.5)
    honest = [row["received_accuracy"] for row in result.clients[2:]]
    print(f"{result.summary['method']:6} accuracy of honest clients {sum(honest) / 8:.3f}")
