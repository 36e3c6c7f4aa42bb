"""What is trained: the networks of a study, their losses, metrics and optimizers.

`Supervised` is one model and one loss. A training that moves several networks in turn, such as a
GAN (`apps.adversarial`), offers the same: named `networks`, and `updates` that come one by one,
each with the name of the network that it moves.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from apps import dynamo, frameworks
from apps.contract import Model, N3LOError, Plain, Schedule, Training, plain
from apps.data import Batch
from apps.losses import Losses, pairs
from apps.metrics import make_metric, on_device
from apps.sources import (
    check_arguments,
    choose,
    describe,
    load_object,
    odd_arguments,
    shown_source,
    signature_of,
    source_file,
)

dynamo.defer()

T = TypeVar("T")

Networks = Mapping[str, nn.Module]
Pair = tuple[torch.Tensor, torch.Tensor]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Update(NamedTuple):
    """One move of one network."""

    network: str  # its name
    loss: torch.Tensor  # mean over this rank's events, with a graph behind it
    sums: torch.Tensor  # what is measured, detached, as `Experiment.no_sums`


class Experiment:
    """Networks by name, how a training step moves them, and how validation judges them.

    What is measured is added up over batches and ranks in tensors whose form is the experiment's:
    `no_sums` of training, `no_val_sums` of validation.
    """

    def __init__(self, networks: dict[str, nn.Module], training: Training) -> None:
        self.networks = networks
        self.num_parameters = sum(
            each.numel() for network in networks.values() for each in network.parameters()
        )
        self.device = torch.device("cpu")  # where losses are; a strategy sets it
        self.epoch = 0  # that is trained, from 1
        self._training = training
        self._half = PRECISIONS.get(training.precision)
        for name in training.optimizers:
            if name not in networks:
                raise N3LOError(
                    f"training.optimizers: there is no network '{name}', only {', '.join(networks)}"
                )

    @property
    def measured(self) -> list[str]:
        """The names of all that is measured, the loss and `val_loss` among them."""
        raise NotImplementedError

    def no_sums(self) -> torch.Tensor:
        """What training has added up before the first batch."""
        raise NotImplementedError

    def no_val_sums(self) -> torch.Tensor:
        """What validation has added up before the first batch."""
        raise NotImplementedError

    def updates(self, networks: Networks, batch: Batch) -> Iterator[Update]:
        """The moves of one training step.

        `networks` are this experiment's own, perhaps wrapped by a strategy.
        """
        raise NotImplementedError

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """What validation adds up of a batch."""
        raise NotImplementedError

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Of training, from the sums over all batches and ranks."""
        raise NotImplementedError

    def val_means(self, sums: torch.Tensor) -> dict[str, float]:
        """Of validation; names are without `val_`."""
        raise NotImplementedError

    def try_validation(self, batch: Batch) -> None:
        """Measure a few events as all are measured at the end of an epoch."""
        self.val_means(self.evaluate(batch))

    def weights(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """What `weights.pt` holds, from the state of each network."""
        raise NotImplementedError

    def states_of(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of each network, from what `weights.pt` holds."""
        raise NotImplementedError

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """What a network gives, in the precision of the study; in float32 for the loss."""
        with self.autocast(self.device):
            outputs = call(model, inputs)
        return float32(outputs)

    def served(self, network: str) -> nn.Module:
        """A network in the form in which others call it."""
        return self.networks[network]

    def check_weights(self) -> None:
        """See that losses and metrics take the weights of events.

        Raises:
            N3LOError: they do not.
        """
        raise N3LOError(
            "data.weights: the model brings its losses (training.loss = 'own'), which are given no "
            "weights; leave it out, and name the weights among data.targets for a loss of the model"
        )

    def inspect(self, batch: Batch) -> list[str]:
        """Warnings about data of which this is a part.

        Raises:
            N3LOError: they cannot be trained on.
        """
        return []

    def rehearse(self, batch: Batch) -> None:
        """Call the networks as a training step does, without a gradient and without a trace."""
        with ExitStack() as unchanged, torch.no_grad():
            for network in self.networks.values():
                unchanged.enter_context(untouched(network))
                network.eval()
            for _ in self.updates(self.networks, batch):
                pass

    def moved(self, network: str) -> None:
        """What follows each update of a network, where all its weights are one rank's."""

    def train(self, mode: bool) -> None:
        """Switch dropout and BatchNorm between training and validation."""
        for network in self.networks.values():
            network.train(mode)

    def optimizers(
        self, parameters: Mapping[str, Sequence[nn.Parameter]] | None = None
    ) -> dict[str, Optimizer]:
        """A new optimizer for each network, by the network's name.

        Args:
            parameters: of each network, in another form than its own.
        """
        of_networks = parameters or {name: net.parameters() for name, net in self.networks.items()}
        return {
            name: make_optimizer(self._training.optimizer_of(name), each)
            for name, each in of_networks.items()
        }

    def schedulers(
        self, optimizers: Mapping[str, Optimizer], updates_per_epoch: int
    ) -> dict[str, LRScheduler]:
        """A new scheduler for each optimizer, if the study asks for one."""
        training = self._training
        if not training.phases:
            return {}
        return {
            name: make_schedule(
                training.phases, optimizer, training.epochs, self.unit_of(name, updates_per_epoch)
            )
            for name, optimizer in optimizers.items()
        }

    def unit_of(self, network: str, updates_per_epoch: int) -> int:
        """How often the scheduler of a network steps in an epoch."""
        per_update = self._training.schedule_per == "update"
        return updates_per_epoch * self.moves_of(network) if per_update else 1

    def moves_of(self, network: str) -> int:
        """How often a network moves in an update."""
        return 1

    def autocast(self, device: torch.device) -> torch.autocast:
        """While networks compute."""
        on = self._half is not None
        return torch.autocast(device.type, self._half or torch.bfloat16, enabled=on)


class Supervised(Experiment):
    """One model that learns to give the targets from the inputs.

    Sums are one vector: of the loss its sum and that of the weights, or of the events where they
    have none, and then what each metric adds up.
    """

    def __init__(
        self,
        model: nn.Module,
        training: Training,
        collate: Callable[[Any], Any] | None = None,
        example: Callable[[], Batch] | None = None,
    ) -> None:
        """
        Args:
            collate: from the inputs of a batch to what the model is called with.
            example: gives events, for metrics that take their form from the targets; it is called
                where something is measured, as what only calls the model may have no such events.
        """
        super().__init__({"model": model}, training)
        self._collate = collate
        self.losses = Losses(training)
        self._metrics = [make_metric(each, self.losses.name, example) for each in training.metrics]
        self.metrics = ["loss", *(each.name for each in self._metrics)]

    @property
    def measured(self) -> list[str]:
        return [prefix + name for prefix in ("", "val_") for name in self.metrics]

    @cached_property
    def _sizes(self) -> list[int]:
        return [2, *(each.size for each in self._metrics)]

    def no_sums(self) -> torch.Tensor:
        return torch.zeros(sum(self._sizes), dtype=torch.float64, device=self.device)

    def no_val_sums(self) -> torch.Tensor:
        return self.no_sums()

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        loss, *others = sums.cpu().split(self._sizes)
        values = [metric.value(each) for metric, each in zip(self._metrics, others, strict=True)]
        return dict(zip(self.metrics, [(loss[0] / loss[1]).item(), *values], strict=True))

    def val_means(self, sums: torch.Tensor) -> dict[str, float]:
        return self.means(sums)

    def weights(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return dict(states["model"])

    def states_of(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"model": weights}

    def updates(self, networks: Networks, batch: Batch) -> Iterator[Update]:
        yield self._update(networks["model"], batch)  # which keeps no outputs alive

    def evaluate(self, batch: Batch) -> torch.Tensor:
        outputs = self.forward(self.networks["model"], batch.inputs)
        return self.sums(self.loss(outputs, batch), outputs, batch)

    def _update(self, model: nn.Module, batch: Batch) -> Update:
        outputs = self.forward(model, batch.inputs)
        loss = self.loss(outputs, batch)
        return Update("model", loss, self.sums(loss, outputs, batch))

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return super().forward(model, inputs if self._collate is None else self._collate(inputs))

    def check_weights(self) -> None:
        for metric in self._metrics:
            if not metric.weighs:
                raise N3LOError(
                    f"training.metrics: '{metric.name}' is of torchmetrics and takes no weights of "
                    "events, which data.weights gives; leave one of them out"
                )

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """The mean over the events, of weight times loss; summed over several outputs."""
        return self.losses(outputs, batch.targets, batch.weights)

    def sums(self, loss: torch.Tensor, outputs: Any, batch: Batch) -> torch.Tensor:
        """What is measured of a batch, detached, as `no_sums`."""
        count = on_device(batch.num_events, loss)
        weight = count if batch.weights is None else batch.weights.double().sum()
        of_loss = torch.stack([(loss.detach() * count).double(), weight])
        if not self._metrics:
            return of_loss
        found = {
            key: (output.detach(), target)
            for key, (output, target) in pairs(outputs, batch.targets).items()
        }
        return torch.cat(
            [of_loss, *(metric.sums(found, batch.weights) for metric in self._metrics)]
        )


def means_of(metrics: Sequence[str], sums: torch.Tensor) -> dict[str, float]:
    """From sum and count of each, (metrics, 2)."""
    return {name: (pair[0] / pair[1]).item() for name, pair in zip(metrics, sums, strict=True)}


# -- the model -------------------------------------------------------------------------------------


def make_experiment(
    model: Model,
    training: Training,
    example: Callable[[], Batch] | None = None,
    collate: str | None = None,
) -> Experiment:
    """What the study trains: a module with the study's loss, or what makes an experiment of itself.

    Args:
        example: gives two events, for models that take their form from the data: those of other
            frameworks, and lazy layers.
        collate: `data.collate`.

    Raises:
        N3LOError: it cannot be made.
    """
    made = build_model(model)
    is_module = isinstance(made, nn.Module)
    make = frameworks.maker_of(made) if is_module else None
    if collate is not None and (make is not None or not is_module):
        raise N3LOError(
            f"data.collate: is for a torch.nn.Module, and {shown_source('model', model.source)} is "
            "called in another way; leave it out, and change the inputs in the model"
        )
    change = collate and make_collate(collate)
    if not is_module:
        return made.experiment(training)
    if example is None or (make is None and not _is_lazy(made)):
        return Supervised(made, training, change, example)
    try:
        if make is not None:
            return make(made, training, example)
        with torch.no_grad():
            inputs = example().inputs
            call(made.eval(), change(inputs) if change else inputs)
        return Supervised(made.train(), training, change, example)
    except N3LOError:
        raise
    except (Exception, SystemExit) as error:  # a user's model can raise anything
        name = model.source.rpartition(":")[2]
        raise N3LOError(
            f"model '{name}' fails on the first batch: {describe(error, model_file(model))}"
        ) from error


def make_collate(source: str) -> Callable[[Any], Any]:
    """The user's function from the inputs of a batch to what the model is called with.

    Raises:
        N3LOError: it cannot be imported, or is none.
    """
    shown = shown_source("data.collate", source)
    function = load_object("data.collate", source)
    if not callable(function):
        raise N3LOError(f"{shown}: is a {type(function).__name__}, not a function")

    def collate(inputs: Any) -> Any:
        try:
            made = function(inputs)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a user's function can raise anything
            raise N3LOError(f"{shown}: {describe(error, source_file(source))}") from error
        return list(made) if isinstance(made, tuple) else made

    return collate


def _is_lazy(module: nn.Module) -> bool:
    return any(isinstance(each, UninitializedParameter) for each in module.parameters())


def call(model: nn.Module, inputs: Any) -> Any:
    """model(x), model(*list) or model(**table)."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, list) else model(inputs)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Leave buffers, modes and random numbers as they were."""
    modes = {each: each.training for each in module.modules()}
    buffers = [(each, each.clone()) for each in module.buffers()]
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for each, mode in modes.items():
            each.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)


def float32(values: Any) -> Any:
    """A tensor, or a list or table of tensors, without half precision."""
    if isinstance(values, dict):
        return {name: float32(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        members = [float32(value) for value in values]
        return type(values)(*members) if hasattr(values, "_fields") else members
    half = isinstance(values, torch.Tensor) and values.dtype in PRECISIONS.values()
    return values.float() if half else values


def build_model(settings: Model) -> Any:
    """Import and construct the model: a module, or one of `apps.adversarial.Adversaries`.

    Raises:
        N3LOError: it cannot be imported or constructed; the message says where it fails.
    """
    shown = shown_source("model.source", settings.source)
    frameworks.choose_backend()
    make = load_object("model.source", settings.source)
    if isinstance(make, nn.Module):
        raise N3LOError(f"{shown}: is a model already; name its class, or a function that gives it")
    signature = signature_of(make, shown)
    check_arguments(signature, settings.args, f"model.args of {shown}")
    try:
        with frameworks.new_model():
            model = make(**settings.args)
    except (Exception, SystemExit) as error:  # a user's class can raise anything
        reason = frameworks.remedy(error) or describe(error, source_file(settings.source))
        odd = odd_arguments(signature, settings.args, "model.args")
        raise N3LOError(f"{shown}: {reason}{odd}") from error
    if not isinstance(model, nn.Module) and not hasattr(model, "experiment"):
        raise N3LOError(
            f"{shown}: gives a {type(model).__name__}, not a torch.nn.Module, nor "
            "apps.adversarial.Adversaries"
        )
    return model


def model_file(settings: Model) -> str | None:
    """The file that the model comes from, once it is imported."""
    return source_file(settings.source)


# -- optimizers ------------------------------------------------------------------------------------

# Left out is what a table of plain values cannot set up (functions, other schedulers), and LBFGS,
# which wants to call the loss itself.
_NOT_OFFERED = {
    *("Optimizer", "LBFGS", "SparseAdam", "LRScheduler", "_LRScheduler"),
    *("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"),
}


def _classes(module: Any, base: type) -> dict[str, Any]:
    """The classes of a module by their names in lower case."""
    return {
        name.lower(): each
        for name, each in vars(module).items()
        if inspect.isclass(each) and issubclass(each, base) and name not in _NOT_OFFERED
    }


OPTIMIZERS = _classes(torch.optim, Optimizer)

# Of pytorch_optimizer: for large batches, and preconditioners that are Kronecker products.
LARGE_BATCH = ("LARS", "Lamb", "SOAP", "Shampoo", "ScalableShampoo", "Kron")
SCHEDULERS = _classes(lr_scheduler, LRScheduler)


def make_optimizer(settings: dict[str, Plain], parameters: Iterable[nn.Parameter]) -> Optimizer:
    """By the name of its class in torch.optim, or one of `LARGE_BATCH`, in any case."""
    trained = [each for each in parameters if each.requires_grad]
    choices = OPTIMIZERS
    if plain(settings["name"]) not in OPTIMIZERS:
        # Not imported before it is needed: that takes half a second.
        offered = importlib.import_module("pytorch_optimizer")
        choices = OPTIMIZERS | {name.lower(): getattr(offered, name) for name in LARGE_BATCH}
        if any(hasattr(each, "full_tensor") for each in trained):  # DTensor: dear to import
            settings = {"foreach": False, **settings}  # their foreach takes no weights in parts
    return _make("training.optimizer", settings, choices, "params", trained)


def make_schedule(
    phases: Sequence[Schedule], optimizer: Optimizer, epochs: int, unit: int
) -> LRScheduler:
    """One scheduler, or several that follow each other.

    Each is named by its class in torch.optim.lr_scheduler, such as cosine_annealing_lr. `epochs` of
    a phase is its length, and stands for `T_max`, `total_iters` or `total_steps`, if that is left
    out; the last phase takes the epochs that are left.

    Args:
        epochs: of the whole training.
        unit: steps of a scheduler in an epoch; its other numbers count steps.
    """
    if len(phases) == 1 and "epochs" not in phases[0]:
        return _make_phase(
            phases[0], optimizer, epochs * unit, may_be_left_out=("T_max", "total_steps")
        )
    ends = list(itertools.accumulate(int(phase["epochs"]) for phase in phases[:-1]))
    left = max(1, epochs - (ends[-1] if ends else 0))
    lengths = [int(phase.get("epochs", left)) * unit for phase in phases]
    schedulers = []
    for phase, length in zip(phases, lengths, strict=True):
        settings = {name: value for name, value in phase.items() if name != "epochs"}
        schedulers.append(_make_phase(settings, optimizer, length, LENGTHS))
    if len(schedulers) == 1:
        return schedulers[0]
    return lr_scheduler.SequentialLR(optimizer, schedulers, [end * unit for end in ends])


LENGTHS = ("T_max", "total_iters", "total_steps")  # what schedulers call their length


def _make_phase(
    settings: Schedule, optimizer: Optimizer, length: int, may_be_left_out: Sequence[str]
) -> LRScheduler:
    make = choose("training.scheduler", plain(settings["name"]), SCHEDULERS)
    known = inspect.signature(make).parameters
    missing = {name: length for name in may_be_left_out if name in known and name not in settings}
    return _make("training.scheduler", {**missing, **settings}, SCHEDULERS, "optimizer", optimizer)


def step_scheduler(scheduler: LRScheduler, val_loss: float) -> None:
    """At the end of an epoch, where it counts epochs."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(val_loss)
    else:
        scheduler.step()


def _make(
    where: str, settings: dict[str, Plain], choices: dict[str, Any], first: str, value: Any
) -> Any:
    arguments = {name: setting for name, setting in settings.items() if name != "name"}
    make = choose(where, plain(settings["name"]), choices)
    signature = inspect.signature(make)
    named = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
    signature = signature.replace(parameters=named)  # some take any, and do nothing with it
    what = f"{where} '{settings['name']}'"
    check_arguments(signature, {first: value, **arguments}, what, (first,))
    try:
        return make(value, **arguments)
    except (ValueError, TypeError) as error:
        raise N3LOError(f"{what}: {error}") from error
