"""`import-nnlo`: look into the model file, write the study, and say what it does not say."""

from __future__ import annotations

import json
import keyword
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apps.contract import N3LOError
from workflow import preflight, whole
from workflow.nnlo import script
from workflow.nnlo.convert import Past, blocks_of, draft_of, too_many_ranks
from workflow.nnlo.options import GAN, OPTIMIZATION, TRAINING, Given, parse
from workflow.study import parse as check_study

DRIVERS = {"training": TRAINING, "optimization": OPTIMIZATION}
MADE = "Made by 'n3lo import-nnlo'"  # in the first line of what we may write again

ADAPTER = '''\
"""{made}: the model of {file}, which was written for NNLO.

{why}.
"""

from apps.models import nnlo

with nnlo.stand_ins():
    import {module}

get_model = {get_model}
'''
COLLATE = "collate = nnlo.collated({module}.get_features()[1])\n"


def import_nnlo(values: Mapping[str, Any]) -> list[str]:
    """Write a study, and beside the model file what it needs; return what there is to say.

    Args:
        values: NNLO's options by `Option.key`, and our own: `model_file`, `to`, `from_script`,
            `ranks`, `driver`.

    Raises:
        N3LOError: the model file, the options or the data cannot be used.
    """
    to: Path = values["to"]
    _check_target(to)
    line = script.read(values["from_script"]) if values["from_script"] else None
    if line is not None and line.driver == GAN:
        raise N3LOError(
            f"{GAN} had one model, the 3DGAN, which comes with N3LO: "
            "studies/calorimeter_gan_parameter_server.toml trains it by easgd"
        )
    of_line = parse(line.words).values if line is not None else {}
    typed = Given(values)
    given = Given({**of_line, **{key: values[key] for key in values if typed.has(key)}})
    model_file = _model_file(given)
    facts = preflight.look("nnlo_import", _request(model_file, given))
    driver = DRIVERS.get(values["driver"] or "") or (line.driver if line is not None else None)
    past = Past(
        driver=driver or (OPTIMIZATION if facts["parameters"] else TRAINING),
        given=given,
        num_ranks=line.num_ranks
        if values["ranks"] is None and line is not None
        else values["ranks"],
        environment=line.environment if line is not None else [],
        facts=facts,
    )
    return _write(past, model_file, to)


def _check_target(to: Path) -> None:
    whole.check_file(to)
    if to.suffix != ".toml":
        raise N3LOError(f"--to {to}: a study's name ends in .toml")
    _check_ours(to)


def _check_ours(path: Path) -> None:
    """Nothing that somebody wrote or changed is lost."""
    if path.exists() and MADE not in path.read_text(encoding="utf-8", errors="replace")[:500]:
        raise N3LOError(f"cannot write '{path}': it is there, and was not made by import-nnlo")


def _model_file(given: Given) -> Path:
    named = given.values.get("model_file") or given.values.get("model")
    if named is None:
        raise N3LOError(
            "name NNLO's model file, such as my_model.py; the models behind --example are "
            "studies/nnlo/mnist_torch.py and studies/calorimeter_gan_bayesian.toml"
        )
    path = Path(named)
    if path.suffix == ".json":
        raise N3LOError(
            f"'{path}' is an architecture of Keras: write a .py file whose get_model returns "
            "keras.models.model_from_json(text), with get_train, get_val and parameter_range, and "
            "name that"
        )
    if path.suffix != ".py":
        raise N3LOError(
            f"'{path}' is no .py file; a pickled model can run anything, and is not read: name the "
            "file with its get_model"
        )
    return path


def _request(model_file: Path, given: Given) -> dict[str, Any]:
    """What `apps.nnlo_import` is asked of the model file."""
    return {
        "file": str(model_file),
        "lists": {"train": given["train_data"], "val": given["val_data"]},
        "names": {"features": given["features_name"], "labels": given["labels_name"]},
    }


def _write(past: Past, model_file: Path, to: Path) -> list[str]:
    facts, folder = past.facts, to.parent.resolve()
    knows_features = facts["features"]["known"]
    needs_adapter = bool(facts["needs"] or facts["builder"] or not knows_features)
    used = model_file.with_name(f"{model_file.stem}_n3lo.py") if needs_adapter else model_file
    place = os.path.relpath(used.resolve(), folder)
    collate = None if knows_features else f"{place}:collate"
    draft = draft_of(past, f"{place}:get_model", collate, folder)
    if to.exists() and to.read_text(encoding="utf-8", errors="replace") != draft.text:
        raise N3LOError(
            f"'{to}' is there, and was changed or made from other options: delete it, or write "
            "another by --to FILE"
        )
    check_study(draft.text, to)
    if needs_adapter:
        _write_adapter(used, model_file, facts, past.given["loss"])
    whole.write_whole(to, draft.text)
    adapter = [f"{used}: made too, because {_why(facts)}"] if needs_adapter else []
    ranks = too_many_ranks(blocks_of(past))
    cores = f" --set cores={ranks}" if ranks else ""
    return [str(to), *adapter, *draft.notes, f"see it: n3lo plan {shlex.quote(str(to))}{cores}"]


def _why(facts: Mapping[str, Any]) -> str:
    reasons = [
        *facts["needs"],
        *([f"it has the class {facts['builder']}"] if facts["builder"] else []),
        *([] if facts["features"]["known"] else ["its features pass a function"]),
    ]
    return ", and ".join(reasons)


def _write_adapter(path: Path, model_file: Path, facts: Mapping[str, Any], loss: str) -> None:
    """Beside the model file, so that it imports it by its name, as all that reads it sees."""
    module = model_file.stem
    if not module.isidentifier() or keyword.iskeyword(module):
        raise N3LOError(
            f"'{model_file}' needs a small file beside it that imports it ({_why(facts)}), and its "
            "name cannot be imported; give it one of letters, digits and _"
        )
    whole.check_file(path)
    _check_ours(path)
    builder = facts["builder"]
    get_model = f"nnlo.built_by({module}.{builder})" if builder else f"{module}.get_model"
    adapted = f"nnlo.adapted({get_model})"
    if facts["is_keras"]:
        adapted = f"nnlo.compiled({get_model}, loss={json.dumps(loss)})"
    why = _why(facts)
    text = ADAPTER.format(
        made=MADE, file=model_file.name, why=why[0].upper() + why[1:], module=module,
        get_model=adapted,
    )  # fmt: skip
    if not facts["features"]["known"]:
        text += COLLATE.format(module=module)
    whole.write_whole(path, text)
