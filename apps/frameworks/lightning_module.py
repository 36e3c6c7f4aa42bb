"""Modules of PyTorch Lightning: their steps give the losses, and what they log is measured.

There is no Trainer. A step is called with (inputs, targets), as from a DataLoader, and its number;
what it logs is averaged over all events, or, where a torchmetrics object is logged, computed from
the states of all events.
"""

from __future__ import annotations

import copy
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_sum

from apps.contract import OWN_LOSS, RESERVED, N3LOError, Training
from apps.data import Batch
from apps.experiment import Experiment, Networks, Update, untouched
from apps.sources import describe

STEPS = ("training_step", "validation_step")
PREFIX = "module."  # of names in the state of `Steps`
OF_VALIDATION = ("val_", "val/")  # in front of what validation logs; `val_` is put there by us
LOG_SETTINGS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")  # by place, after values

# What a Trainer calls beside the steps, and nobody calls here.
NOT_CALLED = (
    *("setup", "teardown", "configure_model", "configure_sharded_model"),
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_validation_start", "on_validation_end"),
    *("on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end"),
    *("on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad"),
    *("on_before_backward", "on_after_backward", "backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "optimizer_step", "optimizer_zero_grad"),
    *("configure_gradient_clipping", "configure_callbacks", "lr_scheduler_step"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("on_save_checkpoint", "on_load_checkpoint"),
    *("train_dataloader", "val_dataloader", "prepare_data"),
)


def make(module: Any, training: Training, example: Callable[[], Batch]) -> LightningSteps:
    """The experiment of a module.

    Raises:
        N3LOError: its steps cannot be called without a Trainer, or the study does not suit it.
    """
    _check(module, training)
    return LightningSteps(module, training, example())


class NoTrainer:
    """What a module may know of the Trainer; all else that it asks for is an error."""

    logger = None
    is_global_zero = True
    sanity_checking = False
    global_rank = local_rank = 0
    current_epoch = 0  # counted from 0, as Lightning does

    def __init__(self, module: Any, max_epochs: int) -> None:
        self.loggers: list[Any] = []
        self.max_epochs = max_epochs
        self._asks, self._file = f"model '{type(module).__name__}'", _file_of(module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of Python, or ours before __init__, in a copy
            raise AttributeError(name)
        frames = [each for each in traceback.extract_stack() if each.filename == self._file]
        place = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
        way_out = "take it from an argument of __init__, or from self"
        if name == "global_step":
            way_out = "use self.current_epoch and batch_idx, or count in a buffer of the module"
        raise N3LOError(
            f"{self._asks} asks for trainer.{name}{place}, and N3LO has no Trainer; {way_out}"
        )


def _file_of(module: Any) -> str | None:
    """Where the class of a module is written."""
    return getattr(sys.modules.get(type(module).__module__), "__file__", None)


class Logged(NamedTuple):
    """What a step has logged under one name."""

    value: Any
    is_sum: bool = False  # over the events, and not their mean
    weight: int | None = None  # of the mean; None = the events of the batch


class Steps(nn.Module):
    """A module, called for one of its steps; afterwards `logged` is what the step has logged."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.logged: dict[str, Logged] = {}
        module.log = self._log
        module.log_dict = self._log_dict

    def forward(self, step: str, batch: tuple[Any, Any], number: int) -> torch.Tensor | None:
        """The loss, if the step gives one."""
        self.logged = {}
        take = getattr(self.module, step)
        takes_number = len(inspect.signature(take).parameters) > 1
        given = take(batch, number) if takes_number else take(batch)
        return given.get("loss") if isinstance(given, Mapping) else given

    def _log(self, name: str, value: Any, *places: Any, **settings: Any) -> None:
        if name in RESERVED and name != "loss":
            return  # a column of each epoch's row already
        # The other settings say where and when it is shown, or how ranks share it: here all that is
        # logged is a column of each epoch's row, of all events and ranks.
        given = {**dict(zip(LOG_SETTINGS, places, strict=False)), **settings}
        if isinstance(value, torch.Tensor):
            value = value.detach()
        is_sum = not isinstance(value, Metric) and _is_sum(name, given.get("reduce_fx", "mean"))
        self.logged[name] = Logged(value, is_sum, given.get("batch_size"))

    def _log_dict(self, values: Mapping[str, Any], *places: Any, **settings: Any) -> None:
        for name, value in values.items():
            self._log(name, value, *places, **settings)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        first = next(self.parameters(), None)
        if first is not None:
            self.module.to(first.device)  # which notes it as self.device
        return self


def _is_sum(name: str, reduce_fx: Any) -> bool:
    """Whether it is summed over an epoch, and not averaged.

    Raises:
        N3LOError: it is neither.
    """
    how = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()  # also torch.mean
    if how not in ("mean", "avg", "sum"):
        raise N3LOError(
            f"'{name}' is logged with reduce_fx = '{how}', and what is logged can only be averaged "
            "or summed over batches and ranks; take 'mean' or 'sum'"
        )
    return how == "sum"


class LightningSteps(Experiment):
    """A training by `training_step`, judged by `validation_step`.

    Sums are a vector: sum and count of the loss and of each number that a step logs, then the
    states of each torchmetrics object that it logs.
    """

    def __init__(self, module: Any, training: Training, example: Batch) -> None:
        self.trainer = module.trainer = NoTrainer(module, training.epochs)
        super().__init__({"model": Steps(module)}, training)
        self.module = module
        self._number = 0  # of the step in the epoch
        self._metrics = [each for each in module.modules() if isinstance(each, Metric)]
        for each in self._metrics:
            each.sync_on_compute = False  # states are summed here
        self._forms = {step: self._form_of(step, example) for step in STEPS}

    def _form_of(self, step: str, example: Batch) -> Form:
        """What a step logs of a batch, seen from two events."""
        network, model = self.networks["model"].eval(), f"model '{type(self.module).__name__}'"
        hooks = "; ".join(_of_hooks(self.module))
        with untouched(network), torch.no_grad():
            try:
                loss = network(step, (example.inputs, example.targets), 0)
            except Exception as error:  # a user's step can raise anything
                if not hooks or isinstance(error, N3LOError):
                    raise
                reason = describe(error, _file_of(self.module))
                raise N3LOError(f"{model} fails on the first batch: {reason}; {hooks}") from error
        form = Form(step, network.logged)
        lacking = {
            "training_step": loss is None and "returns no loss",
            "validation_step": loss is None
            and not form.logs_loss
            and "neither returns a loss nor logs 'val_loss'",
        }
        if lacking[step]:
            raise N3LOError(f"{model}: {step} {lacking[step]}{'; ' if hooks else ''}{hooks}")
        return form

    @property
    def epoch(self) -> int:
        return self.trainer.current_epoch + 1

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.trainer.current_epoch = max(0, epoch - 1)

    @property
    def measured(self) -> list[str]:
        trained, validated = (self._forms[step].names for step in STEPS)
        return [*trained, *(f"val_{name}" for name in validated)]

    def no_sums(self) -> torch.Tensor:
        return self._zeros("training_step")

    def no_val_sums(self) -> torch.Tensor:
        return self._zeros("validation_step")

    def _zeros(self, step: str) -> torch.Tensor:
        return torch.zeros(self._forms[step].size, dtype=torch.float64, device=self.device)

    def updates(self, networks: Networks, batch: Batch) -> Iterator[Update]:
        loss, sums = self._take("training_step", networks["model"], batch)
        if loss is None:
            raise N3LOError(
                f"model '{type(self.module).__name__}': training_step returns no loss for batch "
                f"{self._number - 1} of the epoch, and no rank can leave out a step that others "
                "share; return a loss in every step, if need be one times 0"
            )
        yield Update("model", loss, sums)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        return self._take("validation_step", self.networks["model"], batch)[1]

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        return self._forms["training_step"].means(sums)

    def val_means(self, sums: torch.Tensor) -> dict[str, float]:
        return self._forms["validation_step"].means(sums)

    def train(self, mode: bool) -> None:
        super().train(mode)
        self._number = 0

    def weights(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(PREFIX): value for name, value in states["model"].items()}

    def states_of(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"model": {PREFIX + name: value for name, value in weights.items()}}

    def served(self, name: str) -> nn.Module:
        return self.module

    def inspect(self, batch: Batch) -> list[str]:
        return [*_of_optimizer(self.module, self._training), *_of_hooks(self.module)]

    def _take(
        self, step: str, network: nn.Module, batch: Batch
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        form = self._forms[step]
        form.begin()
        with self.autocast(self.device):
            loss = network(step, (batch.inputs, batch.targets), self._number)
        self._number += 1
        for metric in self._metrics:
            _detach(metric)
        logged = self.networks["model"].logged
        return loss, form.sums(loss, logged, batch.num_events, self.device)


class Form:
    """How what one step logs is added up.

    Args:
        logged: in the first call of the step.

    Raises:
        N3LOError: it cannot be added up.
    """

    def __init__(self, step: str, logged: Mapping[str, Logged]) -> None:
        self._step = step
        named = self._named(logged)
        values = {name: each.value for name, each in named.items()}
        self.metrics = {name: each for name, each in values.items() if isinstance(each, Metric)}
        self.logs_loss = "loss" in values
        numbers = [name for name in ("loss", *values) if name not in self.metrics]
        self._pairs = list(dict.fromkeys(numbers))  # the loss may be what the step returns
        self._summed = {name for name, each in named.items() if each.is_sum}
        for name, metric in self.metrics.items():
            _check_states(name, metric)
        self._shapes = {  # after an update, at which some grow
            name: {state: value.shape for state, value in metric.metric_state.items()}
            for name, metric in self.metrics.items()
        }
        lengths = [shape.numel() for each in self._shapes.values() for shape in each.values()]
        self._lengths = [2 * len(self._pairs), *lengths]
        self.begin()

    @property
    def names(self) -> list[str]:
        return [*self._pairs, *self.metrics]

    @property
    def size(self) -> int:
        return sum(self._lengths)

    def begin(self) -> None:
        """Before a batch: metrics shall hold it alone."""
        for metric in self.metrics.values():
            metric.reset()

    def sums(
        self,
        loss: torch.Tensor | None,
        logged: Mapping[str, Logged],
        num_events: int,
        device: torch.device,
    ) -> torch.Tensor:
        """Of one batch."""
        values = self._named(logged)
        if loss is not None and "loss" not in values:
            values["loss"] = Logged(loss.detach())
        pairs = torch.zeros(len(self._pairs), 2, dtype=torch.float64, device=device)
        for name, (value, is_sum, weight) in values.items():
            if name in self.metrics:
                continue
            if name not in self._pairs:
                raise N3LOError(
                    f"{self._step} logs '{name}', and did not for the first batch; log the same "
                    "in every step"
                )
            number = torch.as_tensor(value, dtype=torch.float64, device=device)
            if number.numel() != 1:
                raise N3LOError(f"{self._step} logs '{name}', which is not one number")
            count = num_events if weight is None else weight
            total = number.reshape(()) if is_sum else number.reshape(()) * count
            pairs[self._pairs.index(name), 0] = total
            pairs[self._pairs.index(name), 1] = count
        states = [
            getattr(metric, state).flatten().double().to(device)
            for name, metric in self.metrics.items()
            for state in self._shapes[name]
        ]
        return torch.cat([pairs.flatten(), *states])

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        of_pairs, *of_states = sums.split(self._lengths)
        found = {}
        pairs = of_pairs.view(-1, 2).tolist()
        for name, (total, count) in zip(self._pairs, pairs, strict=True):
            if count == 0:
                raise N3LOError(f"{self._step} logs '{name}' in no step of the epoch")
            found[name] = total if name in self._summed else total / count
        parts = iter(of_states)
        for name, metric in self.metrics.items():
            found[name] = _value_of(name, metric, self._shapes[name], parts)
        return found

    def _named(self, logged: Mapping[str, Logged]) -> dict[str, Logged]:
        """By the names of columns, of validation without `val_`."""
        found: dict[str, Logged] = {}
        for name, each in logged.items():
            column = name
            if self._step == "training_step" and name == "loss":
                continue  # it is what the step returns
            if self._step == "validation_step" and name.startswith(OF_VALIDATION):
                column = name[len(OF_VALIDATION[0]) :]
            if column in found:
                raise N3LOError(
                    f"{self._step} logs '{name}' and another of that column, as 'acc', 'val_acc' "
                    f"and 'val/acc' are all 'val_acc'; log val_{column} once"
                )
            found[column] = each
        return found


def _detach(metric: Metric) -> None:
    """What it has seen may be a loss with its graph, of which no copy can be made."""
    for state, value in metric.metric_state.items():
        if isinstance(value, list):
            setattr(metric, state, [each.detach() for each in value])
        elif value.requires_grad:
            setattr(metric, state, value.detach())
    metric._computed = metric._forward_cache = None


def _value_of(
    name: str, metric: Metric, shapes: Mapping[str, torch.Size], sums: Iterator[torch.Tensor]
) -> float:
    """From the sums of its states, float64, in their shapes."""
    whole = copy.deepcopy(metric).cpu()
    whole.reset()
    for state, shape in shapes.items():
        values = getattr(whole, state)
        exact = torch.float64 if values.is_floating_point() else values.dtype
        setattr(whole, state, next(sums).cpu().view(shape).to(exact))
    whole._update_count = 1  # or it warns that it has seen nothing
    found = whole.compute()
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise N3LOError(
            f"'{name}' is logged as a {type(metric).__name__}, which gives not one number; set its "
            "average to 'macro', or log numbers of it"
        )
    return float(found)


def _check_states(name: str, metric: Metric) -> None:
    for state, value in metric.metric_state.items():
        if isinstance(value, list) or metric._reductions[state] is not dim_zero_sum:
            raise N3LOError(
                f"'{name}' is logged as a {type(metric).__name__}, which cannot be added up over "
                "batches and ranks; give it thresholds, if it takes them, or log a number"
            )


# -- what the study may ask for --------------------------------------------------------------------


def _check(module: Any, training: Training) -> None:
    name = type(module).__name__
    if training.loss != OWN_LOSS:
        raise N3LOError(
            f"training.loss: '{training.loss}', but '{name}' is a LightningModule, which brings "
            f"its loss; set it to '{OWN_LOSS}'"
        )
    if training.metrics:
        raise N3LOError(f"training.metrics: '{name}' logs what is measured; leave it out")
    if not module.automatic_optimization:
        raise N3LOError(
            f"model '{name}' has automatic_optimization = False and moves its weights itself; give "
            "networks that move in turn as apps.adversarial.Adversaries"
        )
    for step in STEPS:
        if not _defines(module, step):
            raise N3LOError(f"model '{name}' has no {step}; write one, or give a torch.nn.Module")
    if training.strategy in ("tensor", "pipeline"):
        raise N3LOError(
            f"training.strategy: '{training.strategy}' divides a network that is called with the "
            f"inputs, and '{name}' is called for its steps; use 'allreduce' or 'sharded'"
        )


def _defines(module: Any, name: str) -> bool:
    """Whether the user does, and not Lightning alone."""
    place = getattr(getattr(type(module), name, None), "__module__", "lightning.")
    return not place.startswith(("lightning.", "pytorch_lightning."))


def _of_optimizer(module: Any, training: Training) -> Iterator[str]:
    """That of the study is used, which a search can vary."""
    if not _defines(module, "configure_optimizers"):
        return
    own = "configure_optimizers"
    with suppress(Exception):  # it may ask for the Trainer
        given = module.configure_optimizers()
        optimizer = given.get("optimizer") if isinstance(given, dict) else given
        if isinstance(optimizer, torch.optim.Optimizer):
            lr = optimizer.param_groups[0]["lr"]
            own += f" ({type(optimizer).__name__.lower()}, lr = {lr:g})"
    used = training.optimizer_of("model")
    rate = f", lr = {used['lr']:g}" if "lr" in used else ""
    yield f"{own} is not used: training.optimizer is ({used['name']}{rate})"


def _of_hooks(module: Any) -> Iterator[str]:
    hooks = [name for name in NOT_CALLED if _defines(module, name)]
    if hooks:
        yield f"not called, as there is no Trainer: {', '.join(hooks)}"
