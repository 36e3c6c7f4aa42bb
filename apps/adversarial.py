"""Networks that are trained against each other, each with its own loss and optimizer: GANs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from apps.contract import OWN_LOSS, N3LOError, Training
from apps.data import Batch
from apps.experiment import Experiment, Networks, Update, means_of

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Adversaries:
    """What a model file derives from: the networks, whose turn it is, and their losses.

    The study has `loss = "own"`.

    Attributes:
        networks: by name; each has an optimizer of its own (`training.optimizers`).
        turns: the networks that move in a training step, in order, such as ("critic", "critic",
            "generator").
        metrics: what `loss` measures beside the losses.
        verdicts: what `verdict` finds in validation, beside the losses and metrics.
    """

    networks: dict[str, nn.Module]
    turns: Sequence[str]
    metrics: Sequence[str] = ()
    verdicts: Sequence[str] = ()

    def loss(self, turn: int, networks: Networks, inputs: Any, targets: Any) -> Loss:
        """The loss of the network that moves in a turn, and metrics of the turn, by name.

        All are means over the events. Only the network that moves gathers a gradient; the others
        are fixed meanwhile. In half precision this runs under autocast.

        Args:
            turn: its number in `turns`.
            networks: to be called.
        """
        raise NotImplementedError

    def judge(self, inputs: Any, targets: Any) -> torch.Tensor:
        """What validation adds up of a batch for the verdict, (K,) float64 on the CPU.

        K is the same for all batches; sums over batches and ranks must mean the same as those of
        one batch with all events.
        """
        return torch.zeros(0, dtype=torch.float64)

    @property
    def judged(self) -> int:
        """K of `judge`."""
        return 0

    def verdict(self, total: torch.Tensor) -> dict[str, float]:
        """The values of `verdicts`, from the sum of what `judge` gave for all events."""
        return {}

    def inspect(self, inputs: Any, targets: Any) -> list[str]:
        """Warnings about data of which this is a part, one line each.

        Raises:
            N3LOError: they cannot be trained on.
        """
        return []

    def experiment(self, training: Training) -> Adversarial:
        return Adversarial(self, training)


class Adversarial(Experiment):
    """A study of `Adversaries`.

    Measured are the loss of each network, as the mean over its turns, and `loss`, their sum. Sums
    are (metrics, 2), in validation as one vector, with those of the verdict behind.
    """

    def __init__(self, adversaries: Adversaries, training: Training) -> None:
        super().__init__(adversaries.networks, training)
        name = type(adversaries).__name__
        if training.loss != OWN_LOSS:
            raise N3LOError(
                f"training.loss: '{training.loss}', but '{name}' brings its losses; set it to "
                f"'{OWN_LOSS}'"
            )
        if training.metrics:
            raise N3LOError(f"training.metrics: '{name}' brings its metrics; leave it out")
        unknown = set(adversaries.turns) - set(adversaries.networks)
        if unknown or not adversaries.turns:
            raise N3LOError(
                f"model '{name}': turns = {list(adversaries.turns)}, but the networks are "
                f"{', '.join(adversaries.networks)}"
            )
        self.adversaries = adversaries
        losses = [f"{network}_loss" for network in dict.fromkeys(adversaries.turns)]
        self.metrics = ["loss", *losses, *adversaries.metrics]

    @property
    def measured(self) -> list[str]:
        in_validation = [*self.metrics, *self.adversaries.verdicts]
        return [*self.metrics, *(f"val_{name}" for name in in_validation)]

    def no_sums(self) -> torch.Tensor:
        return torch.zeros(len(self.metrics), 2, dtype=torch.float64, device=self.device)

    def no_val_sums(self) -> torch.Tensor:
        size = 2 * len(self.metrics) + self.adversaries.judged
        return torch.zeros(size, dtype=torch.float64, device=self.device)

    def updates(self, networks: Networks, batch: Batch) -> Iterator[Update]:
        for turn, name in enumerate(self.adversaries.turns):
            others = [net for key, net in self.networks.items() if key != name]
            with fixed(others), self.autocast(self.device):
                # Only the network that moves is called through its strategy.
                playing = {**self.networks, name: networks[name]}
                loss, metrics = self.adversaries.loss(turn, playing, batch.inputs, batch.targets)
            yield Update(name, loss, self._sums(name, loss, metrics, batch.num_events))

    def evaluate(self, batch: Batch) -> torch.Tensor:
        sums = torch.stack([each.sums for each in self.updates(self.networks, batch)]).sum(dim=0)
        with self.autocast(self.device):
            judged = self.adversaries.judge(batch.inputs, batch.targets)
        return torch.cat([sums.flatten(), judged.to(self.device)])

    def inspect(self, batch: Batch) -> list[str]:
        return self.adversaries.inspect(batch.inputs, batch.targets)

    def moves_of(self, network: str) -> int:
        return max(1, list(self.adversaries.turns).count(network))

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        names = self.metrics[1:]  # the losses, and then the metrics
        for name, (_, count) in zip(names, sums[1:].tolist(), strict=True):
            if count == 0:
                raise N3LOError(f"metrics has '{name}', which no turn gives")
        found = means_of(names, sums[1:])
        num_losses = len(names) - len(self.adversaries.metrics)
        return {"loss": sum(found[name] for name in names[:num_losses]), **found}

    def val_means(self, sums: torch.Tensor) -> dict[str, float]:
        size = 2 * len(self.metrics)
        found = self.means(sums[:size].view(-1, 2))
        return found | self.adversaries.verdict(sums[size:].cpu())

    def try_validation(self, batch: Batch) -> None:
        self.evaluate(batch)  # a verdict on a few events may not be possible

    def weights(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return dict(states)

    def states_of(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        return weights

    def _sums(
        self, network: str, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor], events: int
    ) -> torch.Tensor:
        sums = self.no_sums()
        for name, value in {f"{network}_loss": loss, **metrics}.items():
            if name not in self.metrics:
                raise N3LOError(f"the loss gives '{name}', which is not in metrics")
            at = self.metrics.index(name)
            sums[at, 0] += value.detach() * events
            sums[at, 1] += events
        return sums


@contextmanager
def fixed(networks: Sequence[nn.Module]) -> Iterator[None]:
    """Their weights gather no gradient in what is computed meanwhile."""
    trained = [each for net in networks for each in net.parameters() if each.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
