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
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from apps import dynamo
from apps.contract import OWN_LOSS, Model, N3LOError, Plain, Schedule, Training, plain
from apps.data import Batch

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

    def weights(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """What `weights.pt` holds, from the state of each network."""
        raise NotImplementedError

    def states_of(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of each network, from what `weights.pt` holds."""
        raise NotImplementedError

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
    """One model that learns to give the targets from the inputs; sums are (metrics, 2)."""

    def __init__(self, model: nn.Module, training: Training) -> None:
        super().__init__({"model": model}, training)
        self.metrics = ["loss", *training.metrics]
        self._loss = _loss(training.loss)
        self._metrics = [_choose("training.metrics", name, METRICS) for name in training.metrics]

    @property
    def measured(self) -> list[str]:
        return [prefix + name for prefix in ("", "val_") for name in self.metrics]

    def no_sums(self) -> torch.Tensor:
        return torch.zeros(len(self.metrics), 2, dtype=torch.float64, device=self.device)

    def no_val_sums(self) -> torch.Tensor:
        return self.no_sums()

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        return means_of(self.metrics, sums)

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
        return self.sums(self.loss(outputs, batch.targets), outputs, batch)

    def _update(self, model: nn.Module, batch: Batch) -> Update:
        outputs = self.forward(model, batch.inputs)
        loss = self.loss(outputs, batch.targets)
        return Update("model", loss, self.sums(loss, outputs, batch))

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """What the model gives, in the precision of the study; in float32 for the loss."""
        with self.autocast(self.device):
            outputs = call(model, inputs)
        return float32(outputs)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The mean over the events; summed, if there are several outputs."""
        pairs = _pairs(outputs, targets)
        return reduce(torch.add, [self._loss(output, target) for output, target in pairs])

    def sums(self, loss: torch.Tensor, outputs: Any, batch: Batch) -> torch.Tensor:
        """Sum and count of each metric, (metrics, 2)."""
        pairs = _pairs(outputs, batch.targets)
        count = _on_device(batch.num_events, loss)
        sums = [torch.stack([loss.detach() * count, count])]
        for metric in self._metrics:
            of_pairs = [metric(output.detach(), target) for output, target in pairs]
            sums.append(torch.stack([torch.stack(pair) for pair in of_pairs]).sum(dim=0))
        return torch.stack([each.double() for each in sums])


def means_of(metrics: Sequence[str], sums: torch.Tensor) -> dict[str, float]:
    """From sum and count of each, (metrics, 2)."""
    return {name: (pair[0] / pair[1]).item() for name, pair in zip(metrics, sums, strict=True)}


# -- the model -------------------------------------------------------------------------------------


def make_experiment(model: Model, training: Training) -> Experiment:
    """What the study trains: a module with the study's loss, or what makes an experiment of itself.

    Raises:
        N3LOError: it cannot be made.
    """
    made = build_model(model)
    return Supervised(made, training) if isinstance(made, nn.Module) else made.experiment(training)


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
        return [float32(value) for value in values]
    half = isinstance(values, torch.Tensor) and values.dtype in PRECISIONS.values()
    return values.float() if half else values


def build_model(settings: Model) -> Any:
    """Import and construct the model: a module, or one of `apps.adversarial.Adversaries`.

    Raises:
        N3LOError: it cannot be imported or constructed; the message says where it fails.
    """
    place, _, name = settings.source.partition(":")
    shown = f"model.source '{Path(place).name if place.endswith('.py') else place}:{name}'"
    try:
        module = _import_file(place) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # a user's file can raise anything
        raise N3LOError(f"{shown}: {describe(error, place)}") from error
    if not hasattr(module, name):
        there = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise N3LOError(f"{shown}: there is no '{name}', only {', '.join(there) or 'no class'}")
    make = getattr(module, name)
    _check_arguments(inspect.signature(make), settings.args, f"model.args of {shown}")
    try:
        model = make(**settings.args)
    except Exception as error:
        raise N3LOError(f"{shown}: {describe(error, module.__file__)}") from error
    if not isinstance(model, nn.Module) and not hasattr(model, "experiment"):
        raise N3LOError(
            f"{shown}: gives a {type(model).__name__}, not a torch.nn.Module, nor "
            "apps.adversarial.Adversaries"
        )
    return model


def model_file(settings: Model) -> str | None:
    """The file that the model comes from, once it is imported."""
    place = settings.source.partition(":")[0]
    return place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)


def describe(error: BaseException, file: str | None = None) -> str:
    """One line: what was raised, and the deepest line of `file`, or else of all, that led there."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        text, place = error.msg, f"{Path(error.filename).name} line {error.lineno}"
    else:
        frame = ([each for each in frames if each.filename == file] or frames)[-1]
        text, place = (
            " ".join(str(error).split()),
            f"{Path(frame.filename).name} line {frame.lineno}",
        )
    return f"{type(error).__name__}: {text[:500]} ({place})"


def _import_file(path: str) -> Any:
    """Import a file by its path; files beside it can be imported by it, as in a script."""
    folder, name = str(Path(path).parent), Path(path).stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"n3lo_model_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses in it look themselves up there
    spec.loader.exec_module(module)
    return module


# -- losses and metrics ----------------------------------------------------------------------------

LOSSES = (
    "cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "nll_loss",
)
LOSS_ALIASES = {"mse": "mse_loss", "mae": "l1_loss", "bce": "binary_cross_entropy_with_logits"}


def _loss(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A mean over the events of a batch."""
    if name == OWN_LOSS:
        raise N3LOError(
            "training.loss: 'own' is for models that bring their losses (apps.adversarial), and "
            "this one is a module; name a loss, such as 'cross_entropy' or 'mse'"
        )
    choices = {each: each for each in LOSSES} | LOSS_ALIASES
    chosen = _choose("training.loss", name, choices)
    function = getattr(functional, chosen)
    if chosen == "cross_entropy":  # takes class numbers as well as one-hot targets
        return function
    if chosen == "nll_loss":
        return lambda outputs, targets: function(outputs, _class_numbers(outputs, targets))
    return lambda outputs, targets: function(outputs, _alike(outputs, targets))


def _accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
    """Of classes (B, C), or of one logit an event (B,) or (B, 1)."""
    if outputs[0].numel() == 1:
        right = (outputs > 0) == (_alike(outputs, targets) > 0.5)
    else:
        right = outputs.argmax(dim=1) == _class_numbers(outputs, targets)
    return right.sum(), _count(right)


def _squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
    return (outputs - _alike(outputs, targets)).square().sum(), _count(outputs)


def _absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
    return (outputs - _alike(outputs, targets)).abs().sum(), _count(outputs)


# Each gives a sum and a count, so that it adds up exactly over batches and ranks.
METRICS = {"accuracy": _accuracy, "mse": _squared_error, "mae": _absolute_error}


def _count(values: torch.Tensor) -> torch.Tensor:
    return _on_device(values.numel(), values)


def _on_device(number: int, like: torch.Tensor) -> torch.Tensor:
    """Made there: a GPU would end all its work before a number is copied to it."""
    return torch.full((), number, dtype=torch.float64, device=like.device)


def _class_numbers(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return targets.argmax(dim=1) if targets.ndim == outputs.ndim else targets


def _alike(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Targets in the shape and type of the outputs; (B,) against (B, 1) would become (B, B)."""
    if outputs.numel() != targets.numel():
        raise N3LOError(f"the model gives {_shape(outputs)}, but the targets are {_shape(targets)}")
    return targets.reshape(outputs.shape).to(outputs.dtype)


def _shape(tensor: torch.Tensor) -> str:
    return f"({', '.join(['B', *map(str, tensor.shape[1:])])})"


def _pairs(outputs: Any, targets: Any) -> list[Pair]:
    """Outputs with their targets; several where the targets are a list or a table."""
    if isinstance(targets, dict) and isinstance(outputs, dict) and outputs.keys() == targets.keys():
        return [(outputs[name], targets[name]) for name in targets]
    if isinstance(targets, list) and isinstance(outputs, list | tuple):
        return list(zip(outputs, targets, strict=True))
    if isinstance(targets, torch.Tensor) and isinstance(outputs, torch.Tensor):
        return [(outputs, targets)]
    raise N3LOError(f"the model gives {_form(outputs)}, but the targets are {_form(targets)}")


def _form(value: Any) -> str:
    if isinstance(value, dict):
        return f"a table of {', '.join(value)}"
    return f"a list of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


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
    make = _choose("training.scheduler", plain(settings["name"]), SCHEDULERS)
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
    make = _choose(where, plain(settings["name"]), choices)
    signature = inspect.signature(make)
    named = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
    signature = signature.replace(parameters=named)  # some take any, and do nothing with it
    what = f"{where} '{settings['name']}'"
    _check_arguments(signature, {first: value, **arguments}, what, (first,))
    try:
        return make(value, **arguments)
    except (ValueError, TypeError) as error:
        raise N3LOError(f"{what}: {error}") from error


def _choose(where: str, name: str, choices: Mapping[str, T]) -> T:
    if name not in choices:
        raise N3LOError(f"{where}: there is no '{name}', only {', '.join(sorted(choices))}")
    return choices[name]


def _check_arguments(
    signature: inspect.Signature, arguments: dict[str, Any], what: str, own: tuple[str, ...] = ()
) -> None:
    """Compare with the signature first: a TypeError from within would mean something else.

    Args:
        own: arguments that do not come from the user.
    """
    try:
        signature.bind(**arguments)
    except TypeError as error:
        accepted = [name for name in signature.parameters if name not in own]
        raise N3LOError(f"{what}: {error}; it takes {', '.join(accepted) or 'none'}") from error
