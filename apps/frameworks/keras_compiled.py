"""What a Keras model was compiled with, beside the study that trains it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import torch

from apps.contract import OWN_LOSS, Plain, Training

PROBABILITY_SUM = 1e-3  # how near to 1 the sum of a softmax is
SAME = 1e-6  # relative: Keras keeps its settings in float32

# Optimizers of Keras that torch has under the same name.
_SHARED = ("adam", "adamw", "sgd", "rmsprop", "nadam", "adamax", "adagrad", "adadelta", "adafactor")
_SHARED_SETTINGS = ("momentum", "nesterov", "weight_decay")

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

    Of a schedule its first rate is taken, if it has one.
    """
    name, changed = type(model.optimizer).__name__.lower(), _changed(model.optimizer)
    if name not in _SHARED or (name == "rmsprop" and not changed):
        return None
    rate = _config(model.optimizer)["learning_rate"]
    if isinstance(rate, Mapping):
        rate = rate["config"].get("initial_learning_rate", 1e-3)
    shared = {"lr": rate, **{key: changed[key] for key in _SHARED_SETTINGS if key in changed}}
    return {"name": name, **{key: _rounded(each) for key, each in shared.items()}}


def of_optimizer(model: keras.Model, training: Training) -> Iterator[str]:
    """A warning, where `compile` says of the optimizer what the study does not."""
    optimizer = model.optimizer
    compiled, used = type(optimizer).__name__, training.optimizer_of("model")
    here = _in_words_of_keras(training)
    lost = {
        key: value
        for key, value in _changed(optimizer).items()
        if isinstance(value, Mapping) or not _is_same(value, here.get(key))
    }
    is_another = compiled.lower() not in ("nonetype", str(used["name"]).lower())
    if not lost and (not is_another or compiled == "RMSprop"):  # which is the default of compile
        return
    shown = ", ".join(f"{key}={_shown(value)}" for key, value in lost.items())
    of_study = ", ".join(f"{key} = {value!r}" for key, value in used.items())
    yield (
        f"the model is compiled with the optimizer {compiled}({shown}), which is not used: "
        f"training.optimizer is ({of_study}){_places(lost)}"
    )


def _changed(optimizer: Any) -> dict[str, Any]:
    """The settings that are not the defaults of its class."""
    if optimizer is None:
        return {}
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


def _in_words_of_keras(training: Training) -> dict[str, Any]:
    optimizer = training.optimizer_of("model")
    betas: Any = optimizer.get("betas", (None, None))
    return {
        **{key: optimizer.get(key) for key in ("momentum", "nesterov", "weight_decay", "amsgrad")},
        "learning_rate": optimizer.get("lr"),
        "beta_1": betas[0],
        "beta_2": betas[1],
        "epsilon": optimizer.get("eps"),
        "rho": optimizer.get("alpha"),
        "global_clipnorm": training.clip_norm,
        "gradient_accumulation_steps": training.accumulate,
    }


def _is_same(one: Any, other: Any) -> bool:
    both = isinstance(one, int | float) and isinstance(other, int | float)
    return bool(np.isclose(one, other, rtol=SAME, atol=0)) if both else one == other


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("class_name", "..."))
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _rounded(value: Any) -> Any:
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
        if takes_logits and _are_probabilities(output, layer):
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


def of_probabilities(outputs: Any, loss: str) -> Iterator[str]:
    """Models of Keras often end in a softmax or sigmoid, which torch has in its losses."""
    layers = {"cross_entropy": "softmax"}
    layers |= dict.fromkeys(("bce", "binary_cross_entropy_with_logits"), "sigmoid")
    layer = layers.get(loss) if isinstance(loss, str) else None
    if layer is None or not isinstance(outputs, torch.Tensor):
        return
    if _are_probabilities(outputs, layer):
        yield (
            f"training.loss: '{loss}' takes logits, and the model gives numbers from 0 to 1; leave "
            f"out its last {layer}, or compile it with the loss of Keras and set loss = "
            f"'{OWN_LOSS}'"
        )
