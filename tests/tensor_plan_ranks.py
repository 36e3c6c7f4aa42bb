"""Run by test_tensor_plan.py on each rank: `tensor_plan_ranks.py out.pt`.

Trains the cases of as many ranks; what each rank holds in the end is gathered and saved by rank 0.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_

from apps.models.jets import DeepSets, InteractionNetwork, JetMlp
from apps.models.mnist import ConvNet
from apps.strategies import tensor_plan
from apps.strategies.group import start_torch
from apps.strategies.tensor_plan import cut_like, local, parts_of, plan_of, whole

STEPS = 3
EVENTS = 8
CLIP_NORM = 0.3


class Skip(nn.Module):
    """The first layer's output is read by the second, and once more in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        outputs = self.second(functional.relu(hidden))
        outputs += hidden
        return outputs


class Functional(nn.Module):
    """Activations that are no modules, one of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(functional.relu(self.second(torch.tanh(self.first(x))), inplace=True))


class Words(nn.Module):
    """The mean of embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words).mean(dim=1))


def mlp(width: int = 16, activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, width), activation or nn.ReLU(), nn.Linear(width, 8), nn.LayerNorm(8)
    )


def dropouts(width: int = 16) -> nn.Module:
    """Within a pair, and where all is whole."""
    return nn.Sequential(
        *(nn.Linear(6, width), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Linear(width, 9)),
        *(nn.Dropout(0.3), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 5), nn.ReLU(inplace=True)),
    )


def tokens() -> nn.Module:
    """Each word for itself."""
    return nn.Sequential(nn.Embedding(10, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.1, batch_first=True)


Make = tuple[Callable[[], nn.Module], Callable[[torch.Generator], torch.Tensor]]


def normal(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(EVENTS, *shape, generator=generator).double()


def uniform(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.rand(EVENTS, *shape, generator=generator).double()


def words(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(10, (EVENTS, 5), generator=generator)


MODELS: dict[str, Make] = {
    "linear": (lambda: nn.Linear(6, 4), normal(6)),
    "mlp": (mlp, normal(6)),
    "uneven": (lambda: mlp(width=7), normal(5, 6)),
    "dropouts": (dropouts, normal(6)),
    "uneven dropouts": (lambda: dropouts(width=7), normal(6)),
    "skip": (Skip, normal(6)),
    "functional": (Functional, normal(4, 6)),
    "DeepSets": (lambda: DeepSets(width=16, dropout=0.2), uniform(20, 16)),
    "JetMlp": (lambda: JetMlp(8, 16, 8, depth=3), uniform(20, 16)),
    "InteractionNetwork": (lambda: InteractionNetwork(hidden=8), uniform(6, 16)),
    "ConvNet": (ConvNet, uniform(28, 28)),
    "words": (Words, words),
    "tokens": (tokens, words),
    "transformer": (transformer, normal(4, 8)),
}
ACTIVATIONS = {
    f"{make.__name__} {settings or ''}": (lambda m=make, s=settings: mlp(7, m(**s)), normal(6))
    for make, settings in [
        *((each, {"inplace": True}) for each in (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU)),
        *((each, {"inplace": True}) for each in (nn.SiLU, nn.Mish)),
        *((each, {}) for each in (nn.GELU, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink)),
        *((each, {}) for each in (nn.Sigmoid, nn.Identity)),
    ]
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parts: torch.optim.SGD(parts, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda parts: torch.optim.Adam(parts, lr=0.01, foreach=True),
    "adamw": lambda parts: torch.optim.AdamW(parts, lr=0.01, fused=True),
    "rprop": lambda parts: torch.optim.Rprop(parts, lr=0.01),
}
# (model, optimizer, given plan)
Case = tuple[str, str, tuple[tuple[str, str], ...]]
CASES: dict[int, list[Case]] = {
    2: [
        *((name, optimizer, ()) for name in MODELS for optimizer in ("sgd", "adam")),
        *(("dropouts", optimizer, ()) for optimizer in ("adamw", "rprop")),
        *((name, "sgd", ()) for name in ACTIVATIONS),
        ("dropouts", "sgd", (("0", "column"), ("3", "row"), ("7", "row"))),
        ("JetMlp", "sgd", (("hidden.*", "column_gathered"), ("head", "row"))),
    ],
    3: [(name, "adam", ()) for name in ("uneven", "uneven dropouts", "DeepSets", "words")],
    4: [("mlp", "sgd", ()), ("DeepSets without dropout", "adam", ())],
}
ALL_MODELS = (
    MODELS
    | ACTIVATIONS
    | {"DeepSets without dropout": (lambda: DeepSets(width=16), uniform(20, 16))}
)


def start(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and a batch."""
    torch.manual_seed(0)
    make, inputs = ALL_MODELS[name]
    return make().double(), inputs(torch.Generator().manual_seed(1))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """Any mean over events that has a gradient in each output."""
    return (outputs - torch.linspace(-1, 1, outputs.shape[-1])).square().mean()


def train(case: Case, meshes: dict[str, DeviceMesh]) -> dict[str, Any]:
    name, make_optimizer, given = case
    mesh = meshes["tensor"]
    model, events = start(name)
    inputs = events
    if "data" in meshes:
        inputs = events.chunk(2)[meshes["data"].get_local_rank()]
    plan = plan_of(model, inputs, mesh.size(), dict(given))
    tensor_plan.split(model, mesh, plan)
    parameters = list(model.parameters())
    parts = parts_of(parameters)
    optimizer = OPTIMIZERS[make_optimizer](parts)
    torch.manual_seed(7)
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(inputs)).backward()
        tensor_plan.give_gradients(parameters, parts)
        if "data" in meshes:
            for part in parts:
                dist.all_reduce(part.grad, group=meshes["data"].get_group())
                part.grad /= meshes["data"].size()
        norm = tensor_plan.total_norm(parameters, parts)
        clip_grads_with_norm_(parts, CLIP_NORM, norm)
        optimizer.step()
        norms.append(norm)
    model.eval()
    with torch.no_grad():
        outputs = model(events)
    named = dict(model.named_parameters())
    states = [optimizer.state[part] for part in parts]
    wholes = [
        {key: whole(value, parameter) for key, value in state.items()}
        for state, parameter in zip(states, parameters, strict=True)
    ]
    return {
        "plan": plan,
        "norms": norms,
        "outputs": outputs,
        "weights": {key: whole(each).detach() for key, each in named.items()},
        "gradients": {
            key: whole(part.grad, each)
            for (key, each), part in zip(named.items(), parts, strict=True)
        },
        "states": wholes,
        "held": sum(part.untyped_storage().nbytes() // part.itemsize for part in parts),
        "is cut again": all(
            torch.equal(local(cut_like(value, parameter)), state[key])
            for before, state, parameter in zip(wholes, states, parameters, strict=True)
            for key, value in before.items()
        ),
        "copied": copied(model, inputs),
    }


def copied(model: nn.Module, inputs: torch.Tensor) -> bool:
    """Whether a copy, and a model with its weights loaded, give the model's outputs."""
    copy_of_it = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(inputs)
        same = torch.equal(copy_of_it(inputs), expected)
        for each in copy_of_it.parameters():
            local(each).zero_()
        state = {key: whole(value) for key, value in model.state_dict().items()}
        own = copy_of_it.state_dict()
        copy_of_it.load_state_dict({key: cut_like(state[key], own[key]) for key in own})
        return same and torch.equal(copy_of_it(inputs), expected)


def run(case: Case, num_ranks: int) -> dict[str, Any]:
    if num_ranks < 4:
        return train(case, {"tensor": init_device_mesh("cpu", (num_ranks,))})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return train(case, {name: mesh[name] for name in ("data", "tensor")})


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    start_torch(world, torch.device("cpu"))
    every = [world.gather(run(case, world.size)) for case in CASES[world.size]]
    if world.rank == 0:
        torch.save(every, sys.argv[1])
    world.Barrier()
    dist.destroy_process_group()
