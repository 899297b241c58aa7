"""Clients that join later, and a personal model saved as a plain PyTorch file."""

from pathlib import Path

import torch

import coterie
from coterie.data import build_population, load

# Handwritten digits over twelve clients in two hidden groups, one with images upside down.
population = build_population(
    load("digits"), clients=12, partition="iid", shift="rotation", shift_params={"groups": 2}
)

# Three clients do not take part in training. Afterwards the method assigns each of them to a group,
# and each adapts the model that it receives on its own data for five epochs.
result = coterie.simulate(
    population, method="fedclust", rounds=10, lr=0.1, holdout=3, admit_epochs=5
)
late = result.summary["newcomers"]
before, after = late["received"]["accuracy"], late["adapted"]["accuracy"]
print(f"{len(result.newcomers)} newcomers: accuracy {before:.3f}, after adapting {after:.3f}")

# The model of one member, as an ordinary module.
member = min(set(result.groups) - set(result.newcomers))
model = result.model(member)
path = Path(f"client-{member}.pt")
torch.save(model.state_dict(), path)
print(f"{path}: {sum(p.numel() for p in model.parameters()):,} parameters")
