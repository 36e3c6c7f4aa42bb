"""What the strategies have in common where each rank holds a part of the weights.

Checkpoints hold the whole, as one process would have it: a training can go on with other ranks, and
`weights.pt` is the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from apps.strategies.base import States
from apps.strategies.local import Local
from apps.strategies.tensor_plan import cut_like, whole

Tensors = dict[str, torch.Tensor]


class Divided(Local):
    """`networks` are this rank's parts; names of parameters are those of the whole networks."""

    def note_names(self) -> None:
        """Remember the whole networks, before they are divided."""
        self._whole_shapes = {
            name: {key: value.shape for key, value in network.state_dict().items()}
            for name, network in self.networks.items()
        }
        self._whole_names = {name: _trained(network) for name, network in self.networks.items()}

    def clip(self, network: str) -> None:
        limit = self.training.clip_norm
        if limit is None:
            return
        norm = self.squared_norm(network).sqrt()
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0)  # nobody waits for the device
        for parameter in self.optimizers[network].param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def squared_norm(self, network: str) -> torch.Tensor:
        """Of the gradient of the whole network; collective."""
        raise NotImplementedError

    def of_part(self, moment: torch.Tensor) -> torch.Tensor:
        """What an optimizer keeps of a parameter, divided as the parameter is, in its form."""
        return moment

    # -- checkpoints -------------------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        return {
            "networks": {name: self._network_state(name) for name in self.networks},
            "optimizers": {name: self._optimizer_state(name) for name in self.networks},
            **{
                kind: {name: each.state_dict() for name, each in self.parts[kind].items()}
                for kind in ("schedulers", "scalers")
            },
        }

    def merged(self, own: dict[str, Any]) -> dict[str, Any]:
        """What all parts of a network have by name, on the first rank; collective."""
        return own

    @property
    def speaks(self) -> bool:
        """Whether a checkpoint has this rank's parts; others only help to put them together."""
        return self.topology.is_first

    def _on_host(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.cpu() if self.speaks else value.new_empty(0, device="cpu")

    def _network_state(self, name: str) -> Tensors:
        own = self.networks[name].state_dict()
        found = self.merged({key: self._on_host(whole(value)) for key, value in own.items()})
        return {key: found[key] for key in self._whole_shapes[name] if key in found}

    def _optimizer_state(self, name: str) -> dict[str, Any]:
        saved, names = self.optimizers[name].state_dict(), _trained(self.networks[name])
        parameters = dict(self.networks[name].named_parameters())
        of_names = {
            names[index]: {
                key: self._on_host(_whole_moment(value, parameters[names[index]]))
                for key, value in state.items()
            }
            for index, state in saved["state"].items()
        }
        found, every = self.merged(of_names), self._whole_names[name]
        state = {index: found[key] for index, key in enumerate(every) if key in found}
        groups = [{**saved["param_groups"][0], "params": list(range(len(every)))}]
        return {"state": state, "param_groups": groups}

    def restore(self, states: States) -> None:
        for name, state in states.get("networks", {}).items():
            self._load_network(name, state)
        for name, state in states.get("optimizers", {}).items():
            self._load_optimizer(name, state)
        rest = {kind: states[kind] for kind in ("schedulers", "scalers") if kind in states}
        super().restore(rest)

    def _load_network(self, name: str, state: Tensors) -> None:
        expected = self._whole_shapes[name]
        given = {key: value.shape for key, value in state.items()}
        wrong = [key for key in {**expected, **given} if expected.get(key) != given.get(key)]
        if wrong:
            key = wrong[0]
            raise RuntimeError(f"{key} is {given.get(key)}, and not {expected.get(key)}")
        with torch.no_grad():
            for key, own in self.networks[name].state_dict().items():
                own.copy_(cut_like(state[key].to(own.device), own))

    def _load_optimizer(self, name: str, state: Mapping[str, Any]) -> None:
        optimizer, parameters = self.optimizers[name], dict(self.networks[name].named_parameters())
        index_of = {key: index for index, key in enumerate(self._whole_names[name])}
        own = {}
        for number, key in enumerate(_trained(self.networks[name])):
            found, like = state["state"].get(index_of[key]), parameters[key]
            if found is not None:
                own[number] = {each: self._cut(value, like) for each, value in found.items()}
        (group,) = optimizer.state_dict()["param_groups"]
        groups = [{**state["param_groups"][0], "params": group["params"]}]
        optimizer.load_state_dict({"state": own, "param_groups": groups})

    def _cut(self, value: Any, like: torch.Tensor) -> Any:
        """A moment is divided as its parameter is; a count of steps is not."""
        same = isinstance(value, torch.Tensor) and value.shape == like.shape
        return self.of_part(cut_like(value.to(like.device), like)) if same else value


def _trained(network: nn.Module) -> list[str]:
    """Names of the parameters that an optimizer has, in its order."""
    return [name for name, each in network.named_parameters() if each.requires_grad]


def _whole_moment(value: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return whole(value, None if isinstance(value, DTensor) else parameter)
