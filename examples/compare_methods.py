"""Compare methods on your own arrays: one (x, y) per client is all that Coterie needs."""

import torch

import coterie

# Twelve clients, each with 100 rows of 20 features. Three hidden rules label the rows, so no single
# model fits all clients, and a client's own 70 training rows are too few to learn its rule well.
torch.manual_seed(0)
rules = torch.randn(3, 20)
clients = []
for client in range(12):
    x = torch.randn(100, 20)
    y = (x @ rules[client % 3] > 0).long()
    clients.append((x, y))

# Every method gets the same clients, with the same split into training, validation and test data.
methods = {
    "local": "local",  # each client alone
    "fedavg": "fedavg",  # one model for all
    "fedper": coterie.fedper(k=1),  # a shared body, a last layer for each client
    "fedclust": "fedclust",  # a model for each group; finds the groups by itself
}
for name, method in methods.items():
    result = coterie.simulate(clients, model="mlp", method=method, rounds=20, lr=0.1)
    scores = result.summary["received"]
    sent = result.summary["bytes"]
    print(
        f"{name:8} mean accuracy {scores['accuracy']:.3f}, "
        f"worst client {scores['worst']:.3f}, {(sent['down'] + sent['up']) / 1000:,.0f} kB sent"
    )
