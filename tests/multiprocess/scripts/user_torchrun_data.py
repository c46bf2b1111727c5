"""A script that divides its data by torchrun's variables; its argument is for `isthmus.join`."""

import os
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

site = isthmus.join(environment="global" if sys.argv[1] == "global" else "site")
torch.manual_seed(0)
data = torch.randn(64, 8)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
site.attach(model, optimizer)

for index in range(int(os.environ["RANK"]), len(data), int(os.environ["WORLD_SIZE"])):
    inputs = data[index : index + 1]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs).squeeze(1), inputs.sum(1))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    site.log(loss=loss)
