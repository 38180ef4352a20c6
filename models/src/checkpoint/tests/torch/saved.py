"""Makes saved.pt and protocol4.pt, which the tests beside this file read: `python saved.py` with PyTorch and NumPy."""

import argparse
from collections import OrderedDict

import numpy
import torch

model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
optimizer.step()

base = torch.arange(24.0).reshape(4, 6)
views = OrderedDict(
    whole=base,
    transposed=base.t(),
    row=base[2],
    column=base[:, 1],
    block=base[1:3, 2:5],
    expanded=base[0, 3:4].expand(2, 2),
    empty=torch.zeros(0, 4),
    scalar=torch.tensor(2.5),
    half=base[0].half(),
    brain=base[0].bfloat16(),
    double=base[0].double(),
    long=torch.tensor([-1, 1 << 40]),
    bool=torch.tensor([True, False]),
    parameter=torch.nn.Parameter(base[1].clone()),
    complex=torch.zeros(2, dtype=torch.complex64),
    sparse=torch.eye(2).to_sparse(),
)
saved = {
    "model": model.state_dict(),
    "views": views,
    "opt": optimizer.state_dict(),
    "args": argparse.Namespace(lr=1e-4, names=["a", "b"], seed=numpy.int64(3), sizes={1, 2}, raw=b"\x00\xff"),
    "rng": torch.get_rng_state()[:8].clone(),
    "history": numpy.arange(3.0),
    "loss": numpy.float32(0.5),
    "step": 1 << 70,
}
torch.save(saved, "saved.pt")
torch.save(saved, "protocol4.pt", pickle_protocol=4)
