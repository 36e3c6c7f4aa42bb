"""Keras 3 models on the PyTorch back end: their variables, random numbers, losses and metrics.

A model is called as `keras.Model.fit` calls it: with one tensor, or one list or table of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import torch
from torch import nn

from apps.contract import OWN_LOSS, N3LOError, Training
from apps.data import Batch
from apps.experiment import Experiment, Networks, Supervised, Update, float32

DEFAULT_OPTIMIZER = "rmsprop"  # of `compile`, where none is named
PROBABILITY_SUM = 1e-3  # how near to 1 the sum of a softmax is


def make(
    model: keras.Model, training: Training, example: Callable[[], Batch]
) -> KerasSupervised | KerasCompiled:
    """The experiment of a model, which is built if it is not: for that it must see a batch.

    Raises:
        N3LOError: the study asks for what cannot be had with Keras.
    """
    _check(model, training)
    keras.config.disable_traceback_filtering()  # which would add pages to each message
    batch = example()
    with keras.device("cpu"), torch.no_grad():
        _call(model, batch.inputs, training=False)
    network = KerasNetwork(model)
    if training.loss == OWN_LOSS:
        return KerasCompiled(network, training, batch)
    return KerasSupervised(network, training)


class KerasNetwork(nn.Module):
    """A built model, with its trained variables as parameters and all others as buffers.

    So statistics of BatchNorm are averaged over the ranks, and no optimizer sees them. Variables
    are named by their paths in Keras. What its layers draw follows torch's seed.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # not as a part: it has the same parameters
        self._seed: int | None = None
        self._names: dict[int, str] = {}  # by identity of the tensor
        trained = {id(each) for each in model.trainable_variables}
        for variable in model.weights:
            name = self._name(variable.path)
            self._names[id(variable.value)] = name
            if id(variable) in trained:
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value)
        weights = {id(each) for each in model.weights}
        self._states = [each.value for each in model.variables if id(each) not in weights]
        self.cpu()  # whatever Keras would choose

    def forward(self, inputs: Any) -> Any:
        if not torch.compiler.is_exporting():
            self._follow_seed()
        with keras.device(str(self.device)):
            return _call(self.model, inputs, self.training)

    @property
    def device(self) -> torch.device:
        tensors = [*self.parameters(), *self.buffers()]
        return tensors[0].device if tensors else torch.device("cpu")

    def as_keras(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's own state_dict, from one of this network."""
        return {
            key: state[self._names[id(value)]] if id(value) in self._names else value.detach().cpu()
            for key, value in self.model.state_dict(keep_vars=True).items()
        }

    def from_keras(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The reverse of `as_keras`.

        Raises:
            KeyError: the state is of another model.
        """
        keys = {id(value): key for key, value in self.model.state_dict(keep_vars=True).items()}
        return {name: state[keys[each]] for each, name in self._names.items()}

    def _name(self, path: str) -> str:
        name = path.replace(".", "_")
        taken = set(self._names.values())
        return name if name not in taken else f"{name}_{len(taken)}"

    def _follow_seed(self) -> None:
        """Keras counts on from seeds of its own; begin anew wherever torch was seeded."""
        seed = torch.initial_seed()
        if seed == self._seed or not self._states:
            return
        self._seed = seed
        numbers = np.random.SeedSequence(seed).generate_state(len(self._states)) >> 1  # int32
        with torch.no_grad():
            for state, number in zip(self._states, numbers.tolist(), strict=True):
                state.copy_(torch.tensor([number, 0]))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """In place: Keras holds these very tensors."""
        metrics = [each.value for each in self.model.metrics_variables]
        for tensor in (*self.buffers(), *self._states, *metrics):
            tensor.data = fn(tensor.data)
        return super()._apply(fn, recurse)


class _OfKeras(Experiment):
    """What both kinds have in common; `weights.pt` has the model's own names."""

    def weights(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return self.networks["model"].as_keras(states["model"])

    def states_of(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"model": self.networks["model"].from_keras(weights)}

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        with self.autocast(self.device):
            outputs = model(inputs)
        return float32(outputs)


class KerasSupervised(_OfKeras, Supervised):
    """A model that is not compiled: loss and metrics of the study, its own regularisation."""

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        with keras.device(str(self.device)):
            return super().loss(outputs, targets) + sum(self.networks["model"].model.losses)

    def inspect(self, batch: Batch) -> list[str]:
        with torch.no_grad():
            self.networks["model"].eval()
            outputs = self.forward(self.networks["model"], batch.inputs)
        return list(_of_probabilities(outputs, self._training.loss))


class KerasCompiled(_OfKeras):
    """A model with the loss and the metrics that it was compiled with.

    Sums are a vector: the loss times the events, the events, and the variables of all metrics,
    which Keras adds up over batches.
    """

    def __init__(self, network: KerasNetwork, training: Training, batch: Batch) -> None:
        super().__init__({"model": network}, training)
        self._model = network.model
        with torch.no_grad():
            outputs = self.forward(network.eval(), batch.inputs)
            self._size = len(self._measure(outputs, batch)[1])  # which builds the metrics
        found = self._model.get_metrics_result()
        for name, value in found.items():
            if torch.as_tensor(value).numel() != 1:
                raise N3LOError(f"the model is compiled with '{name}', which is not one number")
        self.metrics = ["loss", *(name for name in found if name != "loss")]

    @property
    def measured(self) -> list[str]:
        return [prefix + name for prefix in ("", "val_") for name in self.metrics]

    def no_sums(self) -> torch.Tensor:
        return torch.zeros(self._size, dtype=torch.float64, device=self.device)

    def no_val_sums(self) -> torch.Tensor:
        return self.no_sums()

    def updates(self, networks: Networks, batch: Batch) -> Iterator[Update]:
        yield Update("model", *self._measure(self.forward(networks["model"], batch.inputs), batch))

    def evaluate(self, batch: Batch) -> torch.Tensor:
        outputs = self.forward(self.networks["model"], batch.inputs)
        return self._measure(outputs, batch)[1]

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        variables = self._model.metrics_variables
        parts = sums[2:].split([each.value.numel() for each in variables])
        with torch.no_grad(), keras.device(str(self.device)):
            for variable, part in zip(variables, parts, strict=True):
                variable.value.copy_(part.view(variable.value.shape))
            found = self._model.get_metrics_result()
        values = {name: float(value) for name, value in found.items()}
        return {**values, "loss": (sums[0] / sums[1]).item()}

    def val_means(self, sums: torch.Tensor) -> dict[str, float]:
        return self.means(sums)

    def inspect(self, batch: Batch) -> list[str]:
        compiled = type(self._model.optimizer).__name__
        used = str(self._training.optimizer_of("model")["name"])
        if compiled.lower() in (DEFAULT_OPTIMIZER, used.lower(), "nonetype"):
            return []
        return [
            f"the model is compiled with the optimizer {compiled}, which is not used: "
            f"training.optimizer is ({used})"
        ]

    def _measure(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and what a batch adds to the sums."""
        model = self._model
        arguments = {"x": batch.inputs, "y": batch.targets, "y_pred": outputs}
        if "training" in inspect.signature(model.compute_loss).parameters:
            arguments["training"] = self.networks["model"].training
        with keras.device(str(self.device)):
            model.reset_metrics()
            loss = model.compute_loss(**arguments)
            with torch.no_grad():
                detached = keras.tree.map_structure(lambda each: each.detach(), outputs)
                model.compute_metrics(batch.inputs, batch.targets, detached, None)
        count = torch.full_like(loss, batch.num_events, dtype=torch.float64)
        of_loss = torch.stack([loss.detach() * count, count])
        parts = [each.value.detach().flatten().double() for each in model.metrics_variables]
        return loss, torch.cat([each.to(self.device) for each in (of_loss, *parts)])


def _call(model: keras.Model, inputs: Any, training: bool) -> Any:
    """As `fit` does it: a `call` without `training` is not told."""
    told = "training" in inspect.signature(model.call).parameters
    return model(inputs, training=training) if told else model(inputs)


def _of_probabilities(outputs: Any, loss: str) -> Iterator[str]:
    """Models of Keras often end in a softmax or sigmoid, which torch has in its losses."""
    if not isinstance(outputs, torch.Tensor) or outputs.min() < 0 or outputs.max() > 1:
        return
    sums = outputs.flatten(1).sum(dim=1)
    if loss == "cross_entropy" and ((sums - 1).abs() < PROBABILITY_SUM).all():
        layer = "softmax"
    elif loss in ("bce", "binary_cross_entropy_with_logits"):
        layer = "sigmoid"
    else:
        return
    yield (
        f"training.loss: '{loss}' takes logits, and the model gives numbers from 0 to 1; leave out "
        f"its last {layer}, or compile it with the loss of Keras and set loss = '{OWN_LOSS}'"
    )


# -- what the study may ask for --------------------------------------------------------------------


def _check(model: keras.Model, training: Training) -> None:
    name = model.name
    backend = keras.backend.backend()
    if backend != "torch":
        raise N3LOError(
            f"model '{name}' is of Keras on '{backend}': N3LO trains Keras models of the back end "
            "'torch'; unset KERAS_BACKEND, or set it to torch"
        )
    if type(model).train_step is not keras.Model.train_step:
        raise N3LOError(
            f"model '{name}' has its own train_step, which moves the weights itself; give its loss "
            "as compute_loss, or the networks of a GAN as apps.adversarial.Adversaries"
        )
    own = training.loss == OWN_LOSS
    if own and not model.compiled:
        raise N3LOError(
            f"training.loss: 'own', but model '{name}' is not compiled; call "
            "compile(loss=..., metrics=[...]) before it is returned, or name a loss in the study"
        )
    if model.compiled and model.loss is not None and not own:
        raise N3LOError(
            f"training.loss: '{training.loss}', but model '{name}' is compiled with a loss; set "
            f"loss = '{OWN_LOSS}' to use it, or return the model without compile()"
        )
    if own and training.metrics:
        raise N3LOError(
            f"training.metrics: model '{name}' is compiled with its metrics; leave it out"
        )
    if training.strategy in ("sharded", "tensor", "pipeline"):
        raise N3LOError(
            f"training.strategy: '{training.strategy}' cannot divide a Keras model; use "
            "'allreduce', 'downpour', 'easgd' or 'gem'"
        )
    for key in ("compile", "cuda_graphs", "sync_batchnorm", "recompute"):
        if getattr(training, key):
            raise N3LOError(f"training.{key}: cannot be had for a Keras model; leave it out")
