"""As PyTorch's DCGAN example: two models, two optimizers, steps in turn."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--fault", default="")
given = parser.parse_args()
ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(1)
netG = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 7), nn.Tanh())
netD = nn.Sequential(nn.Linear(7, 20), nn.LeakyReLU(0.2), nn.Linear(20, 1))
inner = netD
if ranks > 1:
    dist.init_process_group("gloo")
    netG, netD = DDP(netG), DDP(netD)
    if given.fault == "not_wrapped":
        netG = netG.module
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
generator = torch.Generator().manual_seed(3)
pictures, noises = torch.randn(600, 7, generator=generator), torch.randn(600, 5, generator=generator)
for step in range(8):
    begin = (step * ranks + rank) * given.batch
    real, noise = pictures[begin : begin + given.batch], noises[begin : begin + given.batch]
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    netD.zero_grad()
    criterion(netD(real), ones).backward()
    fake = netG(noise)
    criterion(netD(fake.detach()), zeros).backward()
    optimizerD.step()
    netG.zero_grad()
    criterion(netD(fake), ones).backward()
    optimizerG.step()
