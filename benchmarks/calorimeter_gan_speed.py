"""How many showers per second the 3DGAN in its full size trains, and what the loop costs.

    python benchmarks/calorimeter_gan_speed.py          # on a machine with a GPU
    python benchmarks/calorimeter_gan_speed.py table

A step is the discriminator on real and on generated showers and two moves of the generator. The
bare loop has its showers on the device and does nothing but shuffle, gather, and those moves. "of
torch" are the same networks with its ZeroPad3d, Conv3d and AvgPool3d, in either order of memory.
Epochs of all rows are run in turn, so that noise of the machine is the same for all; the median
counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from apps.adversarial import fixed
from apps.contract import TrainTask, from_dict, write_json
from apps.data import FoldBatches, Share, prepare
from apps.experiment import make_experiment
from apps.models.calorimeter_gan import CalorimeterGan, ChannelsLast, Halved
from apps.models.plane_conv import PlaneConv3d
from apps.strategies import create
from apps.topology import Topology

RESULTS = Path(__file__).parent / "results" / "calorimeter_gan_speed.json"
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BATCHES, STEPS, ROUNDS = ((128, 32), 4, 5) if GPU else ((4,), 2, 3)
ARGS = {"scale": {"unit_gev": 1e-3, "power": 0.5}}
ADAM = {"name": "adam", "lr": 1e-3, "betas": [0.5, 0.9]}

Loop = Callable[[], None]  # an epoch


class Enlarged(nn.Module):
    """nn.Upsample, whose own backward pass takes longer than all the rest together."""

    def __init__(self, up: tuple[int, ...]) -> None:
        super().__init__()
        self.up = up

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        (batch, channels, x, y, z), (p, q, r) = images.shape, self.up
        cells = images.reshape(batch, channels, x, 1, y, 1, z, 1)
        voxels = cells.expand(-1, -1, -1, p, -1, q, -1, r)
        voxels = voxels.reshape(batch, channels, x * p, y * q, z * r)
        last = images.stride(1) == 1
        return voxels.to(memory_format=torch.channels_last_3d) if last else voxels


def of_torch(network: nn.Module) -> nn.Module:
    """The network with layers of torch in place of our own."""
    for name, layer in network.named_children():
        if isinstance(layer, PlaneConv3d):
            x, y, z = layer.padding
            conv = nn.Conv3d(
                layer.in_channels, layer.out_channels, layer.kernel_size,
                padding=0 if any(up > 1 for up in layer.up) else layer.padding,
                bias=layer.bias is not None,
            )  # fmt: skip
            conv.load_state_dict(layer.state_dict())
            if any(up > 1 for up in layer.up):
                conv = nn.Sequential(Enlarged(layer.up), nn.ZeroPad3d((z, z, y, y, x, x)), conv)
            setattr(network, name, conv)
        elif isinstance(layer, Halved):
            setattr(network, name, nn.AvgPool3d(2))
        else:
            of_torch(layer)
    return network


def without_channels_last(network: nn.Module) -> nn.Module:
    for name, layer in network.named_children():
        if isinstance(layer, ChannelsLast):
            setattr(network, name, nn.Identity())
        else:
            without_channels_last(layer)
    return network


# How the networks of a bare loop are made, by its name.
FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "of torch": lambda network: without_channels_last(of_torch(network)),
    "of torch, channels last": lambda network: of_torch(network).to(
        memory_format=torch.channels_last_3d
    ),
    "planes": lambda network: network,
}
BARE = [
    ("of torch", "fp32"),
    ("of torch", "tf32"),
    ("of torch", "bf16"),
    ("of torch, channels last", "bf16"),
    ("planes", "bf16"),
]


def bare_loop(form: str, precision: str, batch_size: int, showers: torch.Tensor) -> Loop:
    torch.manual_seed(1)
    gan = CalorimeterGan(**ARGS)
    networks = {
        name: FORMS[form](network).to(DEVICE).train() for name, network in gan.networks.items()
    }
    optimizers = {
        name: torch.optim.Adam(network.parameters(), ADAM["lr"], ADAM["betas"])
        for name, network in networks.items()
    }
    energies = torch.rand(len(showers), device=DEVICE) * 90 + 10

    def epoch() -> None:
        set_precision(precision)
        order = torch.randperm(len(showers)).to(DEVICE)
        for rows in order.split(batch_size):
            inputs, targets = showers[rows], energies[rows]
            for turn, name in enumerate(gan.turns):
                others = [each for key, each in networks.items() if key != name]
                half = torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16")
                with fixed(others), half:
                    loss, _ = gan.loss(turn, networks, inputs, targets)
                optimizers[name].zero_grad()
                loss.backward()
                optimizers[name].step()

    return epoch


def our_loop(precision: str, batch_size: int, file: Path, cuda_graphs: bool) -> Loop:
    content = {
        "study": "speed", "trial": 0, "fold": 0, "seed": 1, "split_seed": 1,
        "layout": {"gpus_per_rank": int(GPU)},
        "objective": {"metric": "val_shower_error", "goal": "min"},
        "fingerprint": {"data": "d", "model": "m", "code": "c"},
        "model": {"source": "apps.models.calorimeter_gan:CalorimeterGan", "args": ARGS},
        "data": {"files": [str(file)], "inputs": "ECAL", "targets": "energy", "memory_gb": 4.0},
        "training": {
            "loss": "own", "batch_size": batch_size, "precision": precision, "optimizer": ADAM,
            "cuda_graphs": cuda_graphs,
        },
    }  # fmt: skip
    task = from_dict(TrainTask, content)
    topology = Topology.start(task.training, task.layout, MPI.COMM_SELF)
    index, fold_of_event = prepare(task.data, task.split_seed)
    share = Share(rank=0, num_ranks=1, group_size=1)
    data = FoldBatches(task, index, fold_of_event, share, topology.device)
    torch.manual_seed(1)
    experiment = make_experiment(task.model, task.training)
    strategy = create(task.training, experiment, topology, data.preview())

    def epoch() -> None:
        set_precision(precision)
        experiment.train(True)
        strategy.train(data.training(1))
        strategy.clock.read()

    return epoch


def set_precision(precision: str) -> None:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def seconds_of(epoch: Loop) -> float:
    start = time.perf_counter()
    epoch()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(batch_size: int, bare: list[tuple[str, str]], folder: Path) -> list[dict[str, Any]]:
    """Rows of one batch size; an epoch is of `STEPS` whole batches.

    Args:
        bare: form and precision of the bare loops; the last is what ours are compared with.
    """
    events = batch_size * STEPS
    rng = np.random.default_rng(1)
    file = folder / f"showers_{batch_size}.h5"
    with h5py.File(file, "w") as content:  # a fifth is for validation
        content["ECAL"] = rng.random((events * 5 // 4, 25, 25, 25), np.float32) * 1e-3
        content["energy"] = rng.random(events * 5 // 4, np.float32) * 90 + 10
    showers = torch.rand(events, 25, 25, 25, device=DEVICE) * 1e-3
    loops = {
        f"bare loop, {form}, {precision}": bare_loop(form, precision, batch_size, showers)
        for form, precision in bare
    }
    reference = list(loops)[-1]
    loops["N3LO, planes, bf16"] = our_loop("bf16", batch_size, file, cuda_graphs=False)
    if GPU:
        loops["N3LO, planes, bf16, CUDA graphs"] = our_loop("bf16", batch_size, file, True)
    for epoch in loops.values():
        seconds_of(epoch)
    rounds = [{name: seconds_of(epoch) for name, epoch in loops.items()} for _ in range(ROUNDS)]
    rows = []
    for name in loops:
        step = statistics.median(each[name] for each in rounds) / STEPS
        rows.append({
            "loop": name, "batch_size": batch_size, "ms_per_step": 1e3 * step,
            "showers_per_s": batch_size / step,
            "over_bare_planes": statistics.median(each[name] / each[reference] for each in rounds),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def run() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        rows = measure(BATCHES[0], BARE, Path(name))
        for batch_size in BATCHES[1:]:
            rows += measure(batch_size, BARE[-2:], Path(name))
    if GPU:
        device = torch.cuda.get_device_name()
        write_json(RESULTS, {"device": device, "torch": torch.__version__, "rows": rows})


def table() -> None:
    content = json.loads(RESULTS.read_text())
    print(f"{content['device']}, torch {content['torch']}\n")
    print("| showers a step | loop | ms a step | showers/s | time over bare planes |")
    print("|---|---|---|---|---|")
    for row in content["rows"]:
        print(
            f"| {row['batch_size']} | {row['loop']} | {row['ms_per_step']:.1f} "
            f"| {row['showers_per_s']:.0f} | {row['over_bare_planes']:.2f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["run", "table"], default="run")
    {"run": run, "table": table}[parser.parse_args().what]()
