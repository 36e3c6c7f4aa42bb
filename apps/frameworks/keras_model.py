"""Keras 3 models on the PyTorch back end: their variables, random numbers, losses and metrics.

A model is called as `keras.Model.fit` calls it: with one tensor, or one list or table of them.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from torch import nn

from apps.contract import OWN_LOSS, N3LOError, Training
from apps.data import Batch
from apps.experiment import Experiment, Networks, Supervised, Update, float32
from apps.frameworks import keras_compiled

SAME = 1e-3  # relative: how near sums over batches come to what Keras has


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
    _check_constraints(network, training)
    if training.loss == OWN_LOSS:
        return KerasCompiled(network, training, batch)
    return KerasSupervised(network, training, example=example)


class KerasNetwork(nn.Module):
    """A built model, with its trained variables as parameters and all others as buffers.

    So statistics of BatchNorm are averaged over the ranks, and no optimizer sees them. Variables
    are named by their paths in Keras, which several may share: of these each but the first has a
    number behind it. What its layers draw follows torch's seed.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # not as a part: it has the same parameters
        self._seed: int | None = None
        self.masks: Sequence[Any] = ()  # of the outputs of the last call
        self._names: list[str] = []  # in the order of Keras
        trained = {id(each) for each in model.trainable_variables}
        self.constrained = [each for each in model.trainable_variables if each.constraint]
        for variable in model.weights:
            name = self._name(variable.path)
            self._names.append(name)
            if id(variable) in trained:
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value)
        weights = {id(each) for each in model.weights}
        self._states = [each.value for each in model.variables if id(each) not in weights]
        self.cpu()  # whatever Keras would choose

    def forward(self, inputs: Any) -> Any:
        is_trained = not torch.compiler.is_exporting()
        if is_trained:
            self._follow_seed()
        with keras.device(str(self.device)):
            outputs = _call(self.model, inputs, self.training)
        if is_trained:
            self.masks = _masks_of(outputs)
        return outputs

    @property
    def device(self) -> torch.device:
        tensors = [*self.parameters(), *self.buffers()]
        return tensors[0].device if tensors else torch.device("cpu")

    def as_keras(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All weights in the order of Keras' `set_weights`, from a state_dict of this network."""
        return {name: state[name] for name in self._names}

    def from_keras(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The reverse of `as_keras`; also of its older form, the state_dict of the Keras model.

        That has seeds as well, and names such as "d._torch_params.net/dense/kernel".
        """
        seeds = {each.path for each in self.model.variables} - set(self._names)
        named = {key.rpartition("_torch_params.")[2]: value for key, value in weights.items()}
        return {key.replace(".", "_"): each for key, each in named.items() if key not in seeds}

    def _name(self, path: str) -> str:
        name = path.replace(".", "_")
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
        return next(each for each in names if each not in self._names)

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
    """What both kinds have in common; `weights.pt` is in the order of `set_weights`."""

    def weights(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return self.networks["model"].as_keras(states["model"])

    def states_of(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"model": self.networks["model"].from_keras(weights)}

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        with self.autocast(self.device):
            outputs = model(inputs)
        # Neither DDP nor another precision keeps what Keras hangs on a tensor.
        return _with_masks(float32(outputs), self.networks["model"].masks)

    def moved(self, network: str) -> None:
        """Apply the constraints, as the optimizers of Keras do."""
        with torch.no_grad(), keras.device(str(self.device)):
            for variable in self.networks[network].constrained:
                variable.assign(variable.constraint(variable))


class KerasSupervised(_OfKeras, Supervised):
    """A model that is not compiled: loss and metrics of the study, its own regularisation."""

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        with keras.device(str(self.device)):
            penalty = sum(self.networks["model"].model.losses)  # a part of each event's loss
            if batch.weights is not None:
                penalty = penalty * batch.weights.mean()
            return super().loss(outputs, batch) + penalty

    def inspect(self, batch: Batch) -> list[str]:
        with torch.no_grad():
            self.networks["model"].eval()
            outputs = self.forward(self.networks["model"], batch.inputs)
        model = self.networks["model"].model
        return list(keras_compiled.of_probabilities(model, outputs, self._training.loss))


class KerasCompiled(_OfKeras):
    """A model with the loss and the metrics that it was compiled with.

    Sums are a vector: the loss times the events, the events, and the variables of all metrics,
    which Keras adds up over batches.
    """

    def __init__(self, network: KerasNetwork, training: Training, batch: Batch) -> None:
        super().__init__({"model": network}, training)
        self._model = network.model
        try:
            with torch.no_grad():
                outputs = self.forward(network.eval(), batch.inputs)
                self._size = len(self._measure(outputs, batch)[1])  # which builds the metrics
                returned = self._take(outputs, batch)[1]
            found = self._results()
        except ValueError:
            _check_updated(self._model)
            raise
        for name, value in found.items():
            if value.numel() != 1:
                raise N3LOError(f"the model is compiled with '{name}', which is not one number")
        _check_returned(self._model.name, returned, found)
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
            found = self._results()
        values = {name: float(value) for name, value in found.items()}
        return {**values, "loss": (sums[0] / sums[1]).item()}

    def val_means(self, sums: torch.Tensor) -> dict[str, float]:
        return self.means(sums)

    def inspect(self, batch: Batch) -> list[str]:
        network = self.networks["model"].eval()
        with torch.no_grad():
            again = self._measure(self.forward(network, batch.inputs), batch)[0].item()
            outputs = self.forward(network, batch.inputs)
            loss = self._measure(outputs, batch)[0].item()
        mean = self._of_halves(batch)
        # Nothing is known of a model that draws at random here too, as a VAE does.
        is_fixed = np.array_equal(loss, again, equal_nan=True) and not _is_masked(outputs)
        return [
            *keras_compiled.of_optimizer(self._model, self._training),
            *keras_compiled.of_losses(self._model, outputs),
            *(_of_mean(loss, mean, batch.num_events) if is_fixed else ()),
        ]

    def _of_halves(self, batch: Batch) -> float:
        """The mean loss over two halves of a batch.

        Raises:
            N3LOError: a metric of both, by Keras, does not follow from the sums of each.
        """
        first, second = batch.cut(2)
        with torch.no_grad():
            of_first = self.evaluate(first)
            # The model holds the losses of its layers for one call: measure it before the next.
            outputs = self.forward(self.networks["model"], second.inputs)
            sums = of_first + self._measure(outputs, second)[1]
            self.means(of_first)  # which sets the variables, and Keras adds to them
            self._take(outputs, second)
            expected = {name: float(value) for name, value in self._results().items()}
            found = self.means(sums)
        for name in self.metrics[1:]:
            by_keras = expected[name]
            if not np.isclose(found[name], by_keras, rtol=SAME, atol=1e-6, equal_nan=True):
                raise N3LOError(
                    f"model '{self._model.name}': the metric '{name}' is {by_keras:.4g} after two "
                    f"batches, and {found[name]:.4g} from the sums of its variables over both: "
                    "its variables must be sums that begin at 0, so that batches and ranks add up"
                )
        return found["loss"]

    def _measure(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and what a batch adds to the sums."""
        self._model.reset_metrics()
        loss, _ = self._take(outputs, batch)
        count = torch.full_like(loss, batch.num_events, dtype=torch.float64)
        of_loss = torch.stack([loss.detach() * count, count])
        parts = [each.value.detach().flatten().double() for each in self._model.metrics_variables]
        return loss, torch.cat([each.to(self.device) for each in (of_loss, *parts)])

    def _take(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """The loss, and what Keras then shows: it adds the batch to the variables of metrics."""
        model = self._model
        arguments = {"x": batch.inputs, "y": batch.targets, "y_pred": outputs}
        if "training" in inspect.signature(model.compute_loss).parameters:
            arguments["training"] = self.networks["model"].training
        detached = keras.tree.map_structure(lambda each: each.detach(), outputs)
        _with_masks(detached, _masks_of(outputs))
        with keras.device(str(self.device)):
            loss = model.compute_loss(**arguments)
            with torch.no_grad():
                return loss, model.compute_metrics(batch.inputs, batch.targets, detached, None)

    def _results(self) -> dict[str, torch.Tensor]:
        """A metric may give a number, a tensor or a variable."""
        with keras.device(str(self.device)):
            found = self._model.get_metrics_result()
            return {name: keras.ops.convert_to_tensor(value) for name, value in found.items()}


def _call(model: keras.Model, inputs: Any, training: bool) -> Any:
    """As `fit` does it: a `call` without `training` is not told."""
    told = "training" in inspect.signature(model.call).parameters
    return model(inputs, training=training) if told else model(inputs)


def _masks_of(outputs: Any) -> list[Any]:
    return [getattr(each, "_keras_mask", None) for each in keras.tree.flatten(outputs)]


def _is_masked(outputs: Any) -> bool:
    return any(mask is not None for mask in _masks_of(outputs))


def _with_masks(outputs: Any, masks: Sequence[Any]) -> Any:
    for each, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
        if mask is not None:
            each._keras_mask = mask
    return outputs


def _of_mean(loss: float, mean: float, num_events: int) -> Iterator[str]:
    if not np.isclose(loss, mean, rtol=SAME, equal_nan=True):
        yield (
            f"the loss of {num_events} events is {loss:.4g}, and the mean over both halves of them "
            f"is {mean:.4g}: a loss must be a mean over the events (of Keras: reduction = "
            "'sum_over_batch_size'), or it changes with batch_size and the ranks"
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
    _check_kept_settings()
    if type(model).train_step is not keras.Model.train_step:
        raise N3LOError(
            f"model '{name}' has its own train_step, which moves the weights itself; give its loss "
            "as compute_loss, or the networks of a GAN as apps.adversarial.Adversaries"
        )
    if type(model).test_step is not keras.Model.test_step:
        raise N3LOError(
            f"model '{name}' has its own test_step, which is not called; give its loss as "
            "compute_loss, and what it measures as a keras.metrics.Metric in compile(metrics=[...])"
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


def _check_constraints(network: KerasNetwork, training: Training) -> None:
    if network.constrained and training.strategy not in ("local", "allreduce"):
        first = network.constrained[0]
        raise N3LOError(
            f"training.strategy: '{training.strategy}' moves weights in pieces, and "
            f"{first.path} of model '{network.model.name}' has the constraint "
            f"{type(first.constraint).__name__}, of a whole weight; use 'local' or 'allreduce', or "
            "leave it out"
        )


def _check_updated(model: keras.Model) -> None:
    """Metrics of `compile` are built by the compute_metrics of Keras."""
    if not all(getattr(metric, "built", True) for metric in model.metrics):
        raise N3LOError(
            f"model '{model.name}': its compute_metrics does not update the metrics that it is "
            "compiled with; let it call super().compute_metrics(x, y, y_pred, sample_weight)"
        )


def _check_returned(
    name: str, returned: Mapping[str, Any], found: Mapping[str, torch.Tensor]
) -> None:
    """What an own compute_metrics gives must be results of metrics: other numbers do not add up."""
    for key, value in returned.items():
        is_result = key in found and np.isclose(float(value), float(found[key]), equal_nan=True)
        if key != "loss" and not is_result:
            raise N3LOError(
                f"model '{name}': its compute_metrics returns '{key}', which is not the result of "
                "a metric of the model, and so cannot be added up over batches and ranks; make it "
                f"a keras.metrics.Metric with the name '{key}', as an attribute in __init__"
            )


_USUAL = {"floatx": "float32", "epsilon": 1e-7, "image_data_format": "channels_last"}


def _check_kept_settings() -> None:
    """Keras reads settings of the user, of which a study and its cache know nothing."""
    path = Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser() / "keras.json"
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):  # Keras goes on without it as well
        return
    for key, usual in _USUAL.items():
        value = getattr(keras.config, key)()
        if value == kept.get(key) != usual:
            raise N3LOError(
                f"{path}: {key} = {value!r} would change what is trained, and is no part of the "
                f"study; take it out, and call keras.config.set_{key}({value!r}) in the model's "
                "file if you mean it"
            )
