"""What a Keras model was compiled with, beside the study that trains it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import torch

from apps.contract import OWN_LOSS, Plain, Training

PROBABILITY_SUM = 1e-3  # how near to 1 the sum of a softmax is
SAME = 1e-6  # relative: Keras keeps its settings in float32

# Settings of optimizers, by their names in Keras; `rho` of RMSprop is `alpha`.
_TORCH_NAMES = {
    **{"learning_rate": "lr", "epsilon": "eps", "beta_2_decay": "beta2_decay"},
    **{"clip_threshold": "d", "rho": "rho"},
    **{key: key for key in ("momentum", "nesterov", "weight_decay", "amsgrad", "centered")},
    "initial_accumulator_value": "initial_accumulator_value",
}
_KERAS_NAMES = {"alpha": "rho", **{torchs: name for name, torchs in _TORCH_NAMES.items()}}
# Optimizers of Keras that torch has under the same name.
_SHARED = ("adam", "adamw", "sgd", "rmsprop", "nadam", "adamax", "adagrad", "adadelta", "adafactor")

_LAST_LAYERS = {
    "categoricalcrossentropy": "softmax",
    "sparsecategoricalcrossentropy": "softmax",
    "categoricalfocalcrossentropy": "softmax",
    "binarycrossentropy": "sigmoid",
    "binaryfocalcrossentropy": "sigmoid",
}


# -- optimizers ------------------------------------------------------------------------------------


def torch_optimizer(model: keras.Model) -> dict[str, Plain] | None:
    """`training.optimizer` like that of `compile`; None where torch has none, or none was chosen.

    It has its rate, of a schedule the first, and all else that torch has by default otherwise.
    """
    optimizer = model.optimizer
    name = _name_in_torch(optimizer)
    if name not in _SHARED or (name == "rmsprop" and not _changed(optimizer)):
        return None
    usual = _usual_of_torch(name)
    settings = {
        key: value
        for key, value in _in_words_of_torch(name, _config(optimizer)).items()
        if key == "lr" or (key in usual and not _is_same(value, usual[key]))
    }
    return {"name": name, **{key: _rounded(each) for key, each in settings.items()}}


def of_optimizer(model: keras.Model, training: Training) -> Iterator[str]:
    """A warning, where `compile` says of the optimizer what the study does not."""
    optimizer = model.optimizer
    if optimizer is None:
        return
    compiled, used = type(optimizer).__name__, training.optimizer_of("model")
    changed, name = _changed(optimizer), str(used["name"]).lower()
    is_another = _name_in_torch(optimizer) != name
    if is_another and compiled == "RMSprop" and not changed:  # which is the default of compile
        return
    lost = changed if is_another else _lost(optimizer, changed, training)
    if not lost and not is_another:
        return
    shown = ", ".join(f"{key}={_shown(value)}" for key, value in lost.items())
    is_adamw = is_another and compiled.lower() == name
    as_adamw = "; in torch its weight_decay is that of 'adamw'" if is_adamw else ""
    of_study = ", ".join(f"{key} = {value!r}" for key, value in used.items())
    yield (
        f"the model is compiled with the optimizer {compiled}({shown}), which is not used: "
        f"training.optimizer is ({of_study}){_places(lost)}{as_adamw}"
    )


def _lost(optimizer: Any, changed: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """What is otherwise in the study: settings of the user's, and defaults that nobody wrote."""
    used = training.optimizer_of("model")
    said = {
        **_in_words_of_keras(used),
        "global_clipnorm": training.clip_norm,
        "gradient_accumulation_steps": training.accumulate,
    }
    usual = _in_words_of_keras(_usual_of_torch(str(used["name"]).lower()))
    tacit = usual.keys() - said.keys() - {"epsilon"}  # of which both are as good as 0
    here = {**usual, **said}
    return {
        key: value
        for key, value in _config(optimizer).items()
        if key in changed.keys() | tacit and not _is_same(value, here.get(key))
    }


def _changed(optimizer: Any) -> dict[str, Any]:
    """The settings that are not the defaults of its class."""
    try:
        with keras.device("cpu"):
            usual = _config(type(optimizer)())
    except TypeError:  # one of the user's, with arguments
        return {}
    return {
        key: value
        for key, value in _config(optimizer).items()
        if key != "name" and not _is_same(value, usual.get(key))
    }


def _config(optimizer: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy, about code of Keras
        config: dict[str, Any] = optimizer.get_config()
    return config


def _name_in_torch(optimizer: Any) -> str:
    """Weights of Keras decay beside the gradient, which is AdamW in torch."""
    name = type(optimizer).__name__.lower()
    return "adamw" if name == "adam" and optimizer.weight_decay else name


def _usual_of_torch(name: str) -> dict[str, Any]:
    """What torch has by default; empty of an optimizer that is not of torch."""
    kinds = {each.__name__.lower(): each for each in vars(torch.optim).values() if _is_kind(each)}
    if name not in kinds:
        return {}
    arguments = inspect.signature(kinds[name]).parameters.values()
    return {each.name: each.default for each in arguments if each.name != "params"}


def _is_kind(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def _in_words_of_torch(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    found = {_TORCH_NAMES[key]: value for key, value in config.items() if key in _TORCH_NAMES}
    if isinstance(found["lr"], Mapping):
        found["lr"] = _first_rate(found["lr"]["config"])
    if "beta_2" in config:
        found["betas"] = [config["beta_1"], config["beta_2"]]
    if name == "rmsprop":
        found["alpha"] = found.pop("rho")
    if name == "nadam":
        found["momentum_decay"] = 1.0  # Keras takes 0.96 to the power of the step alone
        found["decoupled_weight_decay"] = bool(found["weight_decay"])
    if name == "adafactor":
        found["eps"] = [config["epsilon_1"], config["epsilon_2"]]
    return found


def _first_rate(schedule: Mapping[str, Any]) -> float:
    """Of a schedule's config; after a warm-up, which may begin at 0."""
    values = schedule.get("values") or [1e-3]
    rate: float = schedule.get("warmup_target") or schedule.get("initial_learning_rate", values[0])
    return rate


def _in_words_of_keras(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {_KERAS_NAMES[key]: value for key, value in settings.items() if key in _KERAS_NAMES}
    if "betas" in settings:
        found["beta_1"], found["beta_2"] = settings["betas"]
    return found


def _is_same(one: Any, other: Any) -> bool:
    one, other = ([0 if each is None else each] for each in (one, other))
    try:
        return bool(np.allclose(one, other, rtol=SAME, atol=0))
    except (TypeError, ValueError):  # no numbers
        return one == other


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("class_name", "..."))
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _places(lost: Mapping[str, Any]) -> str:
    """The keys of a study for what is lost, beside those of its optimizer."""
    keys = {
        "training.scheduler": isinstance(lost.get("learning_rate"), Mapping),
        "training.clip_norm": not {"clipnorm", "global_clipnorm"}.isdisjoint(lost),
        "training.accumulate": "gradient_accumulation_steps" in lost,
    }
    found = ", ".join(key for key, is_for_it in keys.items() if is_for_it)
    return f"; see {found}" if found else ""


# -- losses and the last layer ---------------------------------------------------------------------


def of_losses(model: keras.Model, outputs: Any) -> Iterator[str]:
    """Warnings where a loss of `compile` takes logits and gets probabilities, or the reverse."""
    for output, loss in _compared(model, outputs):
        if isinstance(loss, str):
            loss = keras.losses.get(loss)
        is_object = isinstance(loss, keras.losses.Loss)
        name = type(loss).__name__ if is_object else getattr(loss, "__name__", "")
        layer = _LAST_LAYERS.get(name.lower().replace("_", ""))
        if layer is None:
            continue
        takes_logits = is_object and bool(loss.get_config().get("from_logits"))
        if takes_logits and _are_probabilities(output, layer) and layer in _ends_of(model):
            yield (
                f"compile: {name} takes logits (from_logits=True), and the model gives numbers "
                f"from 0 to 1; leave out its last {layer}, or from_logits"
            )
        elif not takes_logits and not _are_probabilities(output, layer):
            yield (
                f"compile: {name} takes probabilities, and the model gives other numbers, from "
                f"{output.min().item():.3g} to {output.max().item():.3g}; let it end in a {layer}, "
                "or set from_logits=True"
            )


def _compared(model: keras.Model, outputs: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """Each output and the loss that it was compiled with."""
    flat = keras.tree.flatten(outputs)
    if isinstance(model.loss, Mapping):
        names = getattr(model, "output_names", ())
        by_name = outputs if isinstance(outputs, Mapping) else dict(zip(names, flat, strict=False))
        yield from ((by_name[key], loss) for key, loss in model.loss.items() if key in by_name)
    elif not isinstance(outputs, Mapping):
        yield from zip(flat, keras.tree.flatten(model.loss), strict=False)


def _are_probabilities(outputs: torch.Tensor, layer: str) -> bool:
    if outputs.min() < 0 or outputs.max() > 1:
        return False
    sums = outputs.sum(dim=-1)
    return layer == "sigmoid" or bool(((sums - 1).abs() < PROBABILITY_SUM).all())


def _ends_of(model: keras.Model) -> set[str]:
    """The last activations; where its graph is not known, those of all layers.

    Numbers alone do not tell probabilities: logits of a new model may all be from 0 to 1.
    """
    try:
        ends = [each._keras_history.operation for each in model.outputs]
    except AttributeError:  # no functional model
        ends = list(model._flatten_layers(include_self=False))
    found = set()
    for end in ends:
        if isinstance(end, keras.Model):
            found |= _ends_of(end)
        else:
            kind = type(end).__name__
            found.add(getattr(getattr(end, "activation", None), "__name__", kind).lower())
    return found


def of_probabilities(model: keras.Model, outputs: Any, loss: str) -> Iterator[str]:
    """Models of Keras often end in a softmax or sigmoid, which torch has in its losses."""
    layers = {"cross_entropy": "softmax"}
    layers |= dict.fromkeys(("bce", "binary_cross_entropy_with_logits"), "sigmoid")
    layer = layers.get(loss) if isinstance(loss, str) else None
    if layer is None or not isinstance(outputs, torch.Tensor):
        return
    if _are_probabilities(outputs, layer) and layer in _ends_of(model):
        yield (
            f"training.loss: '{loss}' takes logits, and the model gives numbers from 0 to 1; leave "
            f"out its last {layer}, or compile it with the loss of Keras and set loss = "
            f"'{OWN_LOSS}'"
        )
