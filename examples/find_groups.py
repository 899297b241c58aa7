"""Ask before training: do the clients fall into groups, and does it pay to train them apart?"""

import coterie
from coterie.data import build_population, load

# Handwritten digits over twelve clients. In one half of them all images are upside down.
people = build_population(
    load("digits"), clients=12, partition="iid", shift="rotation", shift_params={"groups": 2}
)

# Every client represents itself twice, from two halves of its data. Groups are there if one half
# predicts the other. A short trial then tells whether groups have a lower loss than one model.
found = coterie.find_groups(people, model="mlp", lr=0.1)
print(found.verdict)
for group, members in found.members.items():
    print(f"group {group}: clients {members}")

# Use them: FedAvg inside each group, compared with one model for all.
groups = [found.groups[client] for client in range(12)]
apart = coterie.simulate(people, method=coterie.known_groups(groups=groups), rounds=10, lr=0.1)
one = coterie.simulate(people, method="fedavg", rounds=10, lr=0.1)
print(f"accuracy in groups {apart.accuracy:.3f}, with one model {one.accuracy:.3f}")
