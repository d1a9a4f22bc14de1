"""Measure the layers of your own torch model before and after its training: `python examples/measure_layers.py`."""

import torch
from torch import nn

import istar

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)]
network = nn.Sequential(*blocks, nn.Linear(32, 4))

inputs = torch.randn(2_000, 32)
labels = inputs[:, :4].argmax(1)
batches = inputs.split(100)
modules = ["0.0", "1.*", network[2], "3"]  # names, patterns in which * stands for one part, and modules

before = istar.measure(network, batches, modules=modules)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
for _ in range(10):
    for batch, targets in zip(batches, labels.split(100), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(batch), targets).backward()
        optimizer.step()
after = istar.measure(network, batches, modules=modules)

print(before)
print(after)
for violation in after.check(isoscore=(0.2, None), inter_sim=(None, 0.5)):
    print(violation)
