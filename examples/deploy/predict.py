# predict.py
import csv
import json
import sys

import torch
from safetensors.torch import load_file

from coterie.models import make_model

with open("member/model.json") as file:
    about = json.load(file)
kind = dict(about["model"])
model = make_model(kind.pop("name"), tuple(about["shape"]), len(about["classes"]), **kind)
model.load_state_dict(load_file("member/model.safetensors"))
model.eval()

with open(sys.argv[1]) as file:
    rows = list(csv.DictReader(file))
x = torch.tensor([[float(row[name]) for name in about["features"]] for row in rows])
if about["standardised"]:  # in the same way as this hospital's training data
    mean, std = (torch.tensor(about["standardised"][which]) for which in ("mean", "std"))
    x = (x - mean) / std
with torch.no_grad():
    shares, best = model(x).softmax(-1).max(-1)
for share, place in zip(shares.tolist(), best.tolist(), strict=True):
    print(about["classes"][place], f"{share:.2f}")
