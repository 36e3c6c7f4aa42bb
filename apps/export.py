"""Write a trained network so that other programs can run it, and see that it gives the same.

    python -P -m apps.export TASK_FOLDER OUT.onnx --network generator

.pt2 is PyTorch's own (torch.export), .onnx is for ONNX Runtime and the inference of experiments'
software. TorchScript is not offered: PyTorch 2.13 has deprecated it in favour of torch.export.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from apps.check import first_events
from apps.contract import N3LOError
from apps.experiment import Experiment, describe
from apps.trained import load_trained, trained_index

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # relative to the largest output: kernels differ by rounding


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="apps.export", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="TASK_FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--network", metavar="NAME")
    options = parser.parse_args(words)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, as we do not
    try:
        difference = export(options.folder, options.out, options.network)
    except N3LOError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.out}: outputs differ by {difference:.1e} of the largest")
    return 0


def export(folder: Path, out: Path, name: str | None) -> float:
    """Write one network of a task, for any number of events.

    Returns:
        The largest difference of an output, relative to the largest output.

    Raises:
        N3LOError: it cannot be exported, or gives other numbers.
    """
    if out.suffix not in WRITE:
        raise N3LOError(f"--to {out}: it ends in none of {', '.join(WRITE)}")
    if not out.parent.is_dir():
        raise N3LOError(f"--to {out}: there is no folder {out.parent}")
    task, experiment = load_trained(folder, CPU)
    names = list(experiment.networks)
    if name is None and len(names) > 1:
        raise N3LOError(f"--network: name one of {', '.join(names)}")
    name = name or names[0]
    if name not in names:
        raise N3LOError(f"--network {name}: there is none, only {', '.join(names)}")
    network = experiment.served(name)
    batch = first_events(trained_index(folder, task))
    arguments, keywords = arguments_of(experiment, network, batch)
    beside = out.with_name(f".{out.stem}.{os.getpid()}{out.suffix}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of exporters, to their own developers
            found = WRITE[out.suffix](network, arguments, keywords, beside)
        with torch.no_grad():
            expected = network(*arguments, **keywords)
        difference = largest_difference(expected, found)
        if not difference <= TOLERANCE:
            raise N3LOError(
                f"{out}: the exported '{name}' gives other numbers: they differ by "
                f"{difference:.1e} of the largest"
            )
        os.replace(beside, out)
    except OSError as error:
        raise N3LOError(f"'{out}' cannot be written: {error.strerror or error}") from error
    except N3LOError:
        raise
    except Exception as error:  # exporters raise anything where they cannot follow a network
        reason = describe(error).splitlines()[0]
        raise N3LOError(f"network '{name}' cannot be exported to {out.suffix}: {reason}") from error
    finally:
        beside.unlink(missing_ok=True)
    return difference


def arguments_of(
    experiment: Experiment, network: nn.Module, batch: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a network is called with, as seen in a step of its training."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = network.register_forward_pre_hook(
        lambda _, arguments, keywords: seen.append((arguments, keywords)), with_kwargs=True
    )
    experiment.rehearse(batch)
    hook.remove()
    if not seen:
        raise N3LOError("a training step does not call the network's forward, which is exported")
    return tree_map(lambda each: each.detach().clone() if torch.is_tensor(each) else each, seen[0])


def write_pt2(
    network: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], path: Path
) -> Any:
    program = torch.export.export(
        network, arguments, keywords, dynamic_shapes=any_number(network, arguments, keywords)
    )
    torch.export.save(program, path)
    with torch.no_grad():
        return torch.export.load(path).module()(*arguments, **keywords)


def write_onnx(
    network: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], path: Path
) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise N3LOError(
            "ONNX is not installed: pip install 'n3lo[onnx]', or write a .pt2 file"
        ) from error
    torch.onnx.export(
        network,
        arguments,
        path,
        kwargs=keywords,
        dynamo=True,
        external_data=False,
        verbose=False,
        dynamic_shapes=any_number(network, arguments, keywords),
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    values = [each.numpy() for each in tree_leaves((arguments, keywords))]
    names = [each.name for each in session.get_inputs()]
    return list(map(torch.from_numpy, session.run(None, dict(zip(names, values, strict=True)))))


WRITE = {".pt2": write_pt2, ".onnx": write_onnx}


def any_number(network: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The first axis of every tensor is the number of events."""
    events = {0: torch.export.Dim("events")}
    return tree_map(
        lambda each: events if torch.is_tensor(each) else None, (*arguments, *keywords.values())
    )


def largest_difference(expected: Any, found: Any) -> float:
    pairs = zip(tree_leaves(expected), tree_leaves(found), strict=True)
    values = [(one.double().numpy(), other.double().numpy()) for one, other in pairs]
    scale = max(np.abs(one).max() for one, _ in values)
    return float(max(np.abs(one - other).max() for one, other in values) / max(scale, 1e-300))


if __name__ == "__main__":
    sys.exit(main())
