"""A private run: the server gets only sums of several clients, and noise bounds what they reveal.

It needs the extra "privacy": pip install 'coterie[privacy]'
"""

import torch

import coterie

# Forty clients with the same task. Differential privacy hides a whole client, not a sample of it,
# so it costs little accuracy only where there are many clients.
torch.manual_seed(0)
rule = torch.randn(6)
clients = []
for _ in range(40):
    x = torch.randn(60, 6)
    clients.append((x, (x @ rule > 0).long()))

settings = {"model": "logistic", "rounds": 10, "lr": 0.5}
plain = coterie.simulate(clients, **settings)
# "secure": clients mask their uploads, and the masks cancel in the sum.
# "epsilon": uploads are clipped and noised so that the run is (epsilon, delta)-private. In a
# simulation masks and noise follow from the seed: it shows what a real federation would do.
private = coterie.simulate(clients, **settings, privacy={"secure": True, "epsilon": 8})

for name, result in {"plain": plain, "private": private}.items():
    exposed = result.summary["exposure"]["single"].values()  # uploads that arrived outside a sum
    alone = max((kind["clients"] for kind in exposed), default=0)
    print(f"{name:7} accuracy {result.accuracy:.3f}, clients whose own upload arrived: {alone}")

# Delta shrinks with the number of clients: with 40 the promise is weak, with 10,000 it is strong.
spent = private.summary["privacy"]
print(f"spent: epsilon {spent['epsilon']:.2f} at delta {spent['delta']:.3f}")
