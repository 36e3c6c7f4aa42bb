"""Moving from NNLO: what each of its options becomes, and what its model files give."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from conftest import ROOT

from apps import nnlo_import
from apps.contract import N3LOError
from apps.models import nnlo
from workflow import preflight, toml
from workflow.nnlo import script
from workflow.nnlo.command import import_nnlo
from workflow.nnlo.convert import Past, draft_of
from workflow.nnlo.draft import Draft
from workflow.nnlo.options import (
    ENVIRONMENT,
    GAN,
    NOTHING,
    OF_GAN,
    OF_OPTIMIZATION,
    OF_TRAINING,
    OPTIMIZATION,
    OPTIONS,
    TRAINING,
    Option,
    parse,
)
from workflow.study import load

STUDIES = ROOT / "studies" / "nnlo"
PAGE = (ROOT / "docs" / "coming_from_nnlo.md").read_text()

FACTS = {
    "name": "mine",
    "builder": None,
    "is_keras": False,
    "parameters": [{"name": "width", "type": "int", "low": 8, "high": 64}],
    "args": {"width": 36},
    "train": ["/data/a.h5", "/data/b.h5", "/data/c.h5"],
    "val": ["/data/d.h5"],
    "events": {},
    "features": {"name": "features", "field": "features", "steps": [], "known": True},
    "labels": {"name": "labels", "field": "labels", "steps": [], "known": True},
    "needs": [],
    "gives_probabilities": False,
    "num_gpus": 0,
}
SEARCH, TRAIN = (OPTIMIZATION, 7), (TRAINING, 4)  # the driver, and mpirun's number of ranks


def past(words: list[str], driver: str, ranks: int | None, **facts) -> Past:
    given = parse(words)
    names = {"features": given["features_name"], "labels": given["labels_name"]}
    fields = {
        role: {"name": name, "field": name, "steps": [], "known": True}
        for role, name in names.items()
    }
    return Past(driver, given, ranks, [], {**FACTS, **fields, **facts})


def drafted(words: list[str], driver: str, ranks: int | None, **facts) -> Draft:
    return draft_of(past(words, driver, ranks, **facts), "m.py:get_model", None, Path("/here"))


def imported(tmp_path: Path, words: list[str], driver: str, ranks: int | None, **facts):
    """The study, read back and checked as any other."""
    path = tmp_path / "study.toml"
    path.write_text(drafted(words, driver, ranks, **facts).text)
    return load(path).study


def value_at(study, dotted: str):
    value = study
    for name in dotted.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


# Of each option that a study has a key for: words, how it was started, the key, and its value.
GEM, DOWNPOUR, EASGD = (["--mode", mode] for mode in ("gem", "downpour", "easgd"))
ROWS = [
    (["--trial-name", "low pt"], SEARCH, "name", "mine-low-pt"),
    (["--train_data", "train.txt"], SEARCH, "data.files", [*FACTS["train"], *FACTS["val"]]),
    (["--val_data", "val.txt"], SEARCH, "data.validation_fraction", 0.25),
    (["--features-name", "X"], SEARCH, "data.inputs", "X"),
    (["--labels-name", "Y"], SEARCH, "data.targets", "Y"),
    (["--batch", "64"], SEARCH, "training.batch_size", 64),
    (["--batch", "64", "--n-processes", "2"], (TRAINING, 5), "training.batch_size", 32),
    (["--n-masters", "3"], (TRAINING, 7), "layout.sub_masters", [2]),
    (["--n-masters", "3"], (TRAINING, 7), "layout.num_workers", 2),
    (["--n-processes", "2"], (TRAINING, 5), "layout.ranks_per_worker", 2),
    (["--n-processes", "2"], (TRAINING, 5), "layout.num_workers", 2),
    (["--max-gpus", "0"], SEARCH, "layout.gpus_per_rank", 0),
    ([*DOWNPOUR, "--synchronous"], TRAIN, "training.exchange.synchronous", True),
    ([*DOWNPOUR, "--synchronous"], (TRAINING, 41), "training.exchange.backup_workers", 2),
    (["--epochs", "3"], SEARCH, "training.epochs", 3),
    (["--loss", "binary_crossentropy"], SEARCH, "training.loss", "cross_entropy"),
    (["--loss", "categorical_crossentropy"], SEARCH, "training.loss", "cross_entropy"),
    (["--loss", "NLLLoss"], SEARCH, "training.loss", "nll_loss"),
    (["--loss", "MultiMarginLoss"], SEARCH, "training.loss", "multi_margin_loss"),
    (["--loss", "mse"], SEARCH, "training.loss", "cross_entropy"),
    (["--loss", "mean_squared_error"], SEARCH, "training.loss", "mse_loss"),
    (["--loss", "MSE"], SEARCH, "training.loss", "mse_loss"),
    (["--loss", "MSE"], SEARCH, "search.objective.metric", "val_loss"),
    (["--early-stopping", "val_loss,~<,4"], SEARCH, "training.early_stopping.patience", 4),
    (["--target-metric", "val_acc,>,0.97"], SEARCH, "training.target.metric", "val_accuracy"),
    (["--target-metric", "val_acc,>,0.97"], SEARCH, "training.target.value", 0.97),
    ([*EASGD, "--worker-optimizer", "rmsprop"], TRAIN, "training.optimizer.name", "rmsprop"),
    ([*EASGD, "--worker-optimizer", "sgd"], TRAIN, "training.optimizer.lr", 1.0),
    (["--worker-optimizer", "sgd"], (TRAINING, 1), "training.optimizer.name", "sgd"),
    (
        [*EASGD, "--worker-optimizer-params", "{'learning_rate': 0.1, 'beta_1': 0.5}"],
        TRAIN,
        "training.optimizer",
        {"name": "adam", "lr": 0.1, "betas": [0.5, 0.999]},
    ),
    ([*EASGD, "--sync-every", "8"], TRAIN, "training.exchange.sync_every", 8),
    ([], TRAIN, "training.strategy", "gem"),
    (DOWNPOUR, TRAIN, "training.strategy", "downpour"),
    (EASGD, TRAIN, "training.strategy", "easgd"),
    (GEM, (TRAINING, 1), "training.strategy", "local"),
    (["--gem-lr", "0.05"], TRAIN, "training.optimizer.lr", 0.05),
    (["--gem-momentum", "0.5"], TRAIN, "training.optimizer.momentum", 0.5),
    (["--gem-kappa", "1.5"], TRAIN, "training.exchange.kappa", 1.5),
    ([*EASGD, "--elastic-force", "0.5"], TRAIN, "training.exchange.elastic_force", 0.5),
    # NNLO's alpha is 0.5 / 5 with six ranks, here it is the force over two or five workers
    (
        [*EASGD, "--elastic-force", "0.5", "--n-processes", "2"],
        (TRAINING, 6),
        "training.exchange.elastic_force",
        0.2,
    ),
    (
        [*EASGD, "--elastic-force", "0.5", "--block-size", "6", "--n-fold", "3"],
        SEARCH,
        "training.exchange.elastic_force",
        0.1,
    ),
    ([*DOWNPOUR, "--optimizer", "sgd"], TRAIN, "training.optimizer", {"name": "sgd", "lr": 0.01}),
    (["--cache-data", "/scratch"], SEARCH, "data.cache", "/scratch"),
    (["--copy-command", "xrdcp {} {}"], SEARCH, "data.copy_command", "xrdcp {} {}"),
    (["--block-size", "3"], SEARCH, "layout.num_workers", 2),
    (["--block-size", "3"], SEARCH, "search.num_parallel", 2),
    (["--block-size", "6", "--n-fold", "3"], SEARCH, "data.folds", 3),
    (["--block-size", "6", "--n-fold", "3"], SEARCH, "layout.num_workers", 1),
    (["--num-iterations", "12"], SEARCH, "search.num_trials", 12),
    (["--hyper-opt", "genetic"], SEARCH, "search.method", "evolution"),
    (["--hyper-opt", "genetic", "--ga-pop", "5"], SEARCH, "search.num_trials", 50),
    (["--hyper-opt", "genetic", "--ga-pop", "5"], SEARCH, "search.options.population", 5),
    (["--target-objective", "0.05"], SEARCH, "search.stop.value", 0.95),
]


@pytest.mark.parametrize(("words", "how", "key", "value"), ROWS)
def test_an_option_of_nnlo_is_a_value_of_the_study(words, how, key, value, tmp_path):
    assert value_at(imported(tmp_path, words, *how), key) == value


def test_every_option_is_a_value_or_is_reported():
    """`--model` is model.source, and `--example` a study that is there."""
    typed = {word for words, *_ in ROWS for word in words} | {"--mode", "--ga-populations"}
    for option in OPTIONS.values():
        if option.name in ("--model", "--example"):
            continue
        value = [] if option.default is False else [str(option.choices[0] if option.choices else 1)]
        reported = "\n".join(parse([option.name, *value]).idle())
        assert (option.name in reported) != (option.name in typed), option.name


def test_nnlos_own_defaults_are_those_of_the_study(tmp_path):
    study = imported(tmp_path, [], *SEARCH)
    assert study.training.epochs == 1
    assert study.training.batch_size == 100
    assert study.training.optimizer == {"name": "sgd", "lr": 0.01, "momentum": 0.9}
    assert study.training.exchange.kappa == 2.0
    assert (study.search.num_trials, study.search.num_parallel) == (10, 3)
    assert study.search.method == "bayesian"


KERAS_RMSPROP = {"name": "rmsprop", "lr": 0.001, "alpha": 0.9}
KERAS_ADADELTA = {"name": "adadelta", "lr": 1.0, "rho": 0.95, "eps": 1e-7}


@pytest.mark.parametrize(
    ("words", "optimizer"),
    [
        ([*DOWNPOUR, "--optimizer", "rmsprop"], {**KERAS_RMSPROP, "eps": 1e-10}),
        ([*DOWNPOUR, "--optimizer", "adadelta"], {**KERAS_ADADELTA, "lr": 0.001, "eps": 1e-8}),
        ([*EASGD, "--worker-optimizer", "rmsprop"], {**KERAS_RMSPROP, "eps": 1e-7}),
        ([*EASGD, "--worker-optimizer", "adadelta"], KERAS_ADADELTA),
        (
            [*EASGD, "--worker-optimizer", "rmsprop", "--worker-optimizer-params", "{'rho': 0.8}"],
            {**KERAS_RMSPROP, "alpha": 0.8, "eps": 1e-7},
        ),
        (
            [*EASGD, "--worker-optimizer-params", "{'epsilon': None, 'amsgrad': True}"],
            {"name": "adam", "lr": 0.001, "eps": 1e-7, "amsgrad": True},
        ),
    ],
)
def test_an_optimizer_of_keras_keeps_its_settings(words, optimizer, tmp_path):
    study = imported(tmp_path, words, *TRAIN, is_keras=True)
    assert study.training.optimizer == optimizer


def test_clipnorm_of_keras_is_clip_norm(tmp_path):
    words = [*EASGD, "--worker-optimizer-params", "{'clipnorm': 1.0}"]
    assert imported(tmp_path, words, *TRAIN, is_keras=True).training.clip_norm == 1.0


@pytest.mark.parametrize(
    ("words", "how", "said"),
    [
        (["--sync-every", "4"], TRAIN, "NNLO's workers waited for so many"),
        ([*DOWNPOUR, "--synchronous"], SEARCH, "OptimizationDriver.py never passed it on"),
        (["--loss", "MSE", "--target-objective", "0.1"], SEARCH, "the search is by val_loss"),
        (["--loss", "mse"], TRAIN, "--loss mse: with torch, NNLO did not know it"),
        ([*EASGD, "--elastic-force", "2"], TRAIN, "2 is more than easgd takes: it is 1.0"),
        (["--batch", "21", "--n-processes", "2"], (TRAINING, 5), "a worker's batch is 20"),
        (["--hyper-opt", "genetic", "--ga-pop", "2"], SEARCH, "a population has at least 4"),
        ([*EASGD, "--worker-optimizer", "nadam"], TRAIN, "nadam: with torch, NNLO did not know it"),
        ([*DOWNPOUR, "--sync-every", "4"], (TRAINING, 1), "--sync-every 4: not carried over"),
        ([*DOWNPOUR, "--synchronous"], (TRAINING, 1), "--synchronous: not carried over"),
        ([], (OPTIMIZATION, None), "search.num_parallel is 1: give --ranks N"),
    ],
)
def test_what_becomes_something_else_is_said(words, how, said):
    draft = drafted(words, *how)
    assert [note for note in draft.notes if said in note]
    assert ("search", "stop") not in draft.values
    assert "synchronous = true" not in draft.text


@pytest.mark.parametrize("is_keras", [True, False])
def test_what_is_off_at_zero_is_left_out(is_keras, tmp_path):
    words = [*EASGD, "--worker-optimizer-params"]
    off = [*words, "{'lr': 0.1, 'decay': 0.0, 'clipnorm': 0.0, 'clipvalue': 0}"]
    draft, plain = (
        drafted(each, *TRAIN, is_keras=is_keras) for each in (off, [*words, "{'lr': 0.1}"])
    )
    assert draft.values["training", "optimizer"] == plain.values["training", "optimizer"]
    assert ("training", "clip_norm") not in draft.values
    assert draft.notes == plain.notes


def test_what_has_no_counterpart_of_a_keras_optimizer_is_said():
    words = [*EASGD, "--worker-optimizer-params", "{'clipvalue': 1.0}"]
    notes = drafted(words, *TRAIN, is_keras=True).notes
    assert "--worker-optimizer-params: clipvalue: not carried over" in notes


def test_a_variable_that_a_study_has_a_key_for_is_not_carried_over():
    told = past([], *TRAIN)
    draft = draft_of(
        dataclasses.replace(told, environment=["NNLO_SHORT_BATCHES"]), "m.py:f", None, Path("/here")
    )
    assert "NNLO_SHORT_BATCHES: not carried over; set `data.train_fraction`" in draft.notes[-1]


def test_a_study_without_a_name_has_that_of_its_model_file():
    assert 'name = "tagger-one"' in drafted(
        ["--model", "x/tagger.py", "--trial-name", "one"], *TRAIN, name=None
    ).text  # fmt: skip


def test_a_training_alone_is_a_search_of_one_trial(tmp_path):
    study = imported(tmp_path, ["--epochs", "2"], *TRAIN)
    assert study.search.num_trials == 1
    assert study.search.space["training.optimizer.lr"].values == [0.01]
    assert study.model.args == {}


def test_each_line_says_which_option_it_comes_from():
    text = drafted(["--epochs", "3", "--batch", "64"], *SEARCH).text
    assert re.search(r"^epochs = 3 +# --epochs 3$", text, re.M)
    assert re.search(r"^batch_size = 64 +# --batch 64$", text, re.M)
    assert re.search(r"^num_trials = 10 +# --num-iterations 10 \(default\)$", text, re.M)
    assert all(len(line) <= 100 for line in text.splitlines() if line.startswith("#"))


def test_a_dead_option_is_reported_once():
    notes = drafted(["--verbose", "--elastic-lr", "0.1"], *SEARCH).notes
    assert [line for line in notes if line.startswith("--verbose")] == [
        f"--verbose: {NOTHING}: NNLO stored it and never used it"
    ]
    assert len([line for line in notes if line.startswith("--elastic-lr")]) == 1


@pytest.mark.parametrize(
    ("words", "how", "said"),
    [
        (["--block-size", "3"], (OPTIMIZATION, 6), "6 ranks: NNLO ended at once"),
        (["--block-size", "6", "--n-fold", "4"], SEARCH, "--block-size 6 is no multiple of"),
        (["--n-masters", "3"], (TRAINING, 4), "are too few for --n-masters 3 and 2 workers"),
        (["--loss", "KLDiv"], SEARCH, "--loss KLDiv: give one of"),
        (["--early-stopping", "4"], SEARCH, "is not of the form 'val_loss,~<,4'"),
        (["--target-metric", "val_acc,<,0.9"], SEARCH, "more is better"),
        (["--early-stopping", "gan:val_loss,~<,4"], SEARCH, "is of one of several models"),
        ([*EASGD, "--worker-optimizer", "magic"], TRAIN, "NNLO had no such optimizer"),
        ([*EASGD, "--worker-optimizer-params", "lr=1"], TRAIN, "is no dict of Python"),
        (["--epoch-number", "1"], SEARCH, "unrecognized arguments"),
        (["--batch", "0"], SEARCH, "--batch 0 is not at least 1"),
        ([], (TRAINING, 0), "--ranks 0 is not at least 1"),
    ],
)
def test_what_cannot_be_said_here_is_one_line(words, how, said):
    with pytest.raises(N3LOError) as error:
        drafted(words, *how)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_events_are_held_out_as_many_as_nnlo_validated_on(tmp_path):
    events = {"/data/a.h5": 100, "/data/b.h5": 100, "/data/c.h5": 100, "/data/d.h5": 200}
    assert imported(tmp_path, [], *SEARCH, events=events).data.validation_fraction == 0.4


def test_files_that_are_not_here_are_reported():
    assert "data.files: 4 of 4 are not here, such as '/data/a.h5'" in drafted([], *SEARCH).notes


def test_a_model_of_keras_is_compiled_with_the_loss(tmp_path):
    study = imported(tmp_path, [], *SEARCH, is_keras=True)
    assert study.training.loss == "own"
    assert study.search.objective.metric == "val_accuracy"


def test_toml_is_read_back_as_it_was():
    value = {"a b": [1, 2.5, True, 'say "no"\n\x7f', 1e-7], "c": {"d": [{"e": "ü"}]}}
    assert tomllib.loads(f"x = {toml.value(value)}")["x"] == value


# -- the script that started NNLO ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("mpirun -np 7 python3 OptimizationDriver.py --model m.py", 7),
        ("mpirun -tag-output -n 7 python OptimizationDriver.py --model m.py > log 2>&1", 7),
        ("srun --ntasks=7 python OptimizationDriver.py --model m.py", 7),
        ("jsrun -n 4 -a 2 -c 7 -g 1 python OptimizationDriver.py --model m.py | tee log", 8),
        ("#!/bin/bash\n#SBATCH -n 7\ncd x && srun ./OptimizationDriver.py --model m.py", 7),
        ("N=7\nmpirun -np $N \\\n  python nnlo/driver/OptimizationDriver.py --model m.py", 7),
        ("jsrun -p 6 python OptimizationDriver.py --model m.py", 6),
        ("mpirun -c 5 python OptimizationDriver.py --model m.py < /dev/null", 5),
        ("mpirun -np ${N:-4} python -m nnlo.driver.OptimizationDriver --model m.py", 4),
        ("srun -N 4 --ntasks-per-node=2 python OptimizationDriver.py --model m.py", 8),
        ("#SBATCH -N 4\n#SBATCH --ntasks-per-node=2\nsrun OptimizationDriver.py --model m.py", 8),
        ("#SBATCH -n 7\nmpirun python OptimizationDriver.py --model m.py", 7),
        ("#SBATCH --nodes=3\nmpirun -npernode 4 OptimizationDriver.py --model m.py", 12),
        ("#PBS -l select=2:mpiprocs=4\nmpiexec OptimizationDriver.py --model m.py", 8),
        ("#BSUB -n 7\nmpirun python OptimizationDriver.py --model m.py", 7),
        ("srun -n 5 exec i bash -c '. e; python OptimizationDriver.py --model m.py'", 5),
        ('bsub -W 10 "jsrun -n 7 python OptimizationDriver.py --model m.py"', 7),
        ('A=(--model\n m.py)\nmpirun -n 7 OptimizationDriver.py "${A[@]}"', 7),
        ("[ -f OptimizationDriver.py ]\nsrun -n 7 OptimizationDriver.py --model m.py", 7),
        ("if x; then srun -n 7 OptimizationDriver.py --model m.py; fi", 7),
        ("chmod +x OptimizationDriver.py\nsrun -n 7 ./OptimizationDriver.py --model m.py", 7),
        ("ln -s x/OptimizationDriver.py\nsrun -n 7 ./OptimizationDriver.py --model m.py", 7),
        ('export M=m.py N=7; mpirun -np "$N" OptimizationDriver.py --model $M', 7),
        ("N=3; M=$N; mpirun -np $M OptimizationDriver.py --model m.py; N=5", 3),
        ("N=7\nmpirun -np $N OptimizationDriver.py --model m.py; N=5", 7),
        ("#SBATCH -n 7\nsrun -n $SLURM_NTASKS OptimizationDriver.py --model m.py", 7),
        (
            "#SBATCH -N 4 --ntasks-per-node=2\n"
            "mpirun -np ${SLURM_NTASKS} OptimizationDriver.py --model m.py",
            8,
        ),
        ("#BSUB -n 6\nmpirun -n $LSB_DJOB_NUMPROC OptimizationDriver.py --model m.py", 6),
        ("# OptimizationDriver.py\nHOST=here python OptimizationDriver.py --model m.py & ", None),
    ],
)
def test_a_line_of_a_script_is_understood(text, ranks, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(text)
    line = script.read(str(path))
    assert (line.driver, line.num_ranks) == (OPTIMIZATION, ranks)
    assert line.words == ["--model", "m.py"]


def test_a_line_may_be_longer_than_the_name_of_a_file():
    line = f"mpirun -n 3 python TrainingDriver.py --model m.py --trial-name {300 * 'a'}"
    assert script.read(line).num_ranks == 3


def test_a_line_may_be_given_in_quotes():
    line = script.read("mpirun -np 4 python TrainingDriver.py --early 'val_loss,~<,4'")
    assert (line.driver, line.num_ranks) == (TRAINING, 4)
    assert parse(line.words)["early_stopping"] == "val_loss,~<,4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python train.py\n", "no line starts TrainingDriver.py or OptimizationDriver.py"),
        ("python train.py\n", "in quotes, or its options behind the model file, with --driver"),
        ("mpirun -np 3 ./MPIDriver.py m.json t.list v.list", "MPIDriver.py is of mpi_learn"),
        ("python hyperparameter_search_option3.py", "option3.py is of mpi_learn or mpi_opt"),
        ("mpirun -np $N TrainingDriver.py", "'-np $N' is no number of ranks"),
        ("#SBATCH -n 7\nsrun -n $N TrainingDriver.py", "'-n $N' is no number of ranks"),
        ("mpiexec -n 1 TrainingDriver.py : -n 3 TrainingDriver.py", "':' joins several commands"),
        ("mpiexec -n 1 hostname : -n 3 TrainingDriver.py", "':' joins several commands"),
        ("TrainingDriver.py\nTrainingDriver.py", "starts NNLO 2 times"),
    ],
)
def test_a_script_that_does_not_say_it_is_one_line(text, said, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(text)
    with pytest.raises(N3LOError, match=re.escape(said)):
        script.read(str(path))


# -- model files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adaptor", "found"),
    [
        (lambda x: x, {}),
        (lambda x: x.astype("float32"), {}),
        (lambda x: np.swapaxes(x, 1, 2), {"steps": [{"name": "transpose", "axes": [2, 1]}]}),
        (lambda x: x[..., None], {"steps": [{"name": "channel_axis", "at": "last"}]}),
        (lambda x: x[:, None], {"steps": [{"name": "channel_axis", "at": "first"}]}),
        (lambda x: x.reshape(len(x), -1), {"steps": ["flatten"]}),
        (lambda x: x / 4, {"steps": [{"name": "scale", "by": 0.25}]}),
        (lambda x: x[:, -6:-1], {"field": "[:, -6:-1]"}),
        (lambda x: x[:, 2:5], {"field": "[:, 2:5]"}),
        (lambda x: x[:, 1:], {"field": "[:, 1:]"}),
        (lambda x: x[:, -1], {"field": "[:, -1]"}),
        (lambda x: x[:, :, :3], {"field": "[:, :, :3]"}),
    ],
)
def test_what_an_adaptor_does_is_seen_from_what_it_gives(adaptor, found):
    assert next(nnlo_import.recognised(adaptor, (9, 5))) == found


def test_an_adaptor_that_mixes_events_is_notrecognised():
    assert list(nnlo_import.recognised(lambda x: x[::-1], (9, 5))) == []
    assert list(nnlo_import.recognised(lambda x: x * x, (9, 5))) == []


@pytest.mark.parametrize(
    "adaptor",
    [
        np.abs,
        np.nan_to_num,
        np.round,
        lambda x: np.maximum(x, 0),
        lambda x: np.where(x < 1e-4, 0, x),
        lambda x: np.clip(x, -1e6, 1e6),
        lambda x: x.astype(int),
        lambda x: x[:10_000],
        lambda x: np.abs(x[:, -1]),
        lambda x: np.maximum(x, 0) / 4,
    ],
)
def test_an_adaptor_that_changes_some_values_alone_is_not_taken_for_a_step(adaptor):
    assert list(nnlo_import.recognised(adaptor, (9, 5))) == []


def test_an_adaptor_is_tried_on_the_data_too():
    data = np.random.default_rng(4).normal(size=(40, 9, 5)).astype("float32")
    assert next(nnlo_import.recognised(lambda x: x, (9, 5), data)) == {}
    assert list(nnlo_import.recognised(lambda x: x[: len(data) - 1], (9, 5), data)) == []
    assert list(nnlo_import.recognised(lambda x: np.where(x == x.max(), 0, x), (9, 5), data)) == []


def test_a_file_without_events_is_as_none(tmp_path):
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        file["x"] = np.zeros((0, 9, 5))

    def flat(x):
        return x.reshape(len(x), math.prod(x.shape[1:]))  # also of none, where -1 is not known

    module = SimpleNamespace(get_features=lambda: ("x", flat))
    field = nnlo_import._adapted_field(module, "features", "x", str(tmp_path / "empty.h5"))
    assert field["steps"] == ["flatten"]
    assert field == nnlo_import._adapted_field(module, "features", "x", None)


def test_whole_numbers_may_become_integers():
    classes = np.eye(5, dtype="float32")
    assert next(nnlo_import.recognised(lambda y: y.astype(int), (5,), classes)) == {}
    assert list(nnlo_import.recognised(np.abs, (5,), classes)) == []
    pixels = np.arange(30, dtype="uint8").reshape(6, 5)
    found = next(nnlo_import.recognised(lambda x: x / 255.0, (5,), pixels))
    assert found == {"steps": [{"name": "scale", "by": pytest.approx(1 / 255)}]}


@pytest.mark.parametrize(
    ("adaptor", "alone"),
    [
        (lambda x: x * x, True),
        (lambda x: x[:, :1].squeeze(), True),
        (lambda x: [np.abs(x), x.sum(axis=1)], True),
        (lambda x: x[::-1], False),
        (lambda x: x[:1000], False),
        (lambda x: x / x.max(), False),
    ],
)
def test_it_is_seen_whether_a_function_may_be_called_for_each_batch(adaptor, alone):
    assert nnlo_import._takes_each_alone(adaptor, None) is alone


def test_a_class_number_is_recognised_by_its_argmax():
    found = next(nnlo_import.recognised(lambda y: y.argmax(axis=1), (5,)))
    assert found == {"steps": ["class_number"]}


WRAPPED = """
import torch
import setGPU
from nnlo.train.model import MPIModel
from mpi_learn.train.model import ModelBuilder


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(3, width).cuda()
        self.mask = torch.ones(3).cuda()

    def forward(self, x):
        return self.layer(x * self.mask)


def get_model(width=4):
    return MPIModel(model=Net(width))


def get_train():
    return ["a.h5"]


def get_features():
    return "x", lambda x: x * x


class Builder(ModelBuilder):
    def build_model(self):
        return MPIModel(Net(2))
"""


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    """Look into model files here, and not in a process of its own, which must import torch."""

    def look(program, request):
        assert program == "nnlo_import"
        return json.loads(json.dumps(nnlo_import.look(**request)))

    monkeypatch.setattr(preflight, "look", look)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        is_stand_in = name.partition(".")[0] in nnlo.PACKAGES and file is None
        if is_stand_in or (file is not None and Path(file).is_relative_to(tmp_path)):
            del sys.modules[name]


@pytest.mark.usefixtures("in_process")
def test_a_file_of_nnlo_is_imported_without_nnlo_and_without_a_gpu(tmp_path):
    path = tmp_path / "wrapped_net.py"
    path.write_text(WRAPPED)
    to = tmp_path / "study.toml"
    lines = import_nnlo(
        {"model_file": str(path), "to": to, "from_script": None, "ranks": 1, "driver": None}
    )
    assert lines[0] == str(to)
    assert "it imports setGPU, and it imports nnlo, and it imports mpi_learn" in lines[1]
    study = load(to).study
    assert study.model.source == "wrapped_net_n3lo.py:get_model"
    assert study.data.collate == "wrapped_net_n3lo.py:collate"

    adapter = __import__("wrapped_net_n3lo")
    model = adapter.get_model(width=5)
    assert "mask" in dict(model.named_buffers())  # so that it moves with the model
    assert "mask" not in model.state_dict()
    assert model(torch.ones(2, 3)).shape == (2, 5)
    assert adapter.collate(torch.tensor([3.0])).tolist() == [9.0]
    built = nnlo.adapted(nnlo.built_by(__import__("wrapped_net").Builder))()
    assert built(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize("option", ["--n-processes", "--n-masters", "--n-fold", "--block-size"])
def test_a_number_of_ranks_below_one_is_one_line(option):
    with pytest.raises(N3LOError, match=f"{option} 0 is not at least 1"):
        drafted([option, "0"], *SEARCH)


def test_nothing_of_the_users_is_written_over(tmp_path):
    to = tmp_path / "study.toml"
    to.write_text("mine")
    with pytest.raises(N3LOError, match="was not made by import-nnlo"):
        import_nnlo({"to": to})
    assert to.read_text() == "mine"


SMALL = """
import torch
{above}

def get_model(width=4):
    return {model}


{below}
def get_train():
    return {train}
"""
FINE = {"above": "", "model": "torch.nn.Linear(3, width)", "below": "", "train": "['a.h5']"}
RANGE = "from nnlo.x import Integer\nget_model.parameter_range = [Integer(1, 4, name='deep')]"
OF_FILE = "def get_features():\n    return 'x', lambda x: {}"


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"above": "import sys\nsys.exit(3)"}, "it calls sys.exit(3); move that below"),
        ({"model": "[torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)]"}, "several models"),
        ({"above": "from nnlo.train.GanModel import G", "model": "G()"}, "calorimeter_gan.toml"),
        ({"below": RANGE}, "'deep' is no argument of get_model, which takes width"),
        ({"train": "['x.list']"}, "gives a list with 'x.list' in it"),
        ({"below": OF_FILE.format("x / x.max()")}, "measures all of a file"),
    ],
)
@pytest.mark.filterwarnings("ignore:nnlo.train.GanModel")
def test_what_a_model_file_does_wrong_is_one_line(changed, said, tmp_path):
    name = f"wrong_{len(said)}"
    path = tmp_path / f"{name}.py"
    path.write_text(SMALL.format(**{**FINE, **changed}))
    to = tmp_path / "s.toml"
    values = {"model_file": str(path), "to": to, "from_script": None, "ranks": 1, "driver": None}
    with pytest.raises(N3LOError, match=re.escape(said)):
        import_nnlo(values)
    assert [each.name for each in tmp_path.glob("*.*")] == [path.name]


@pytest.mark.usefixtures("in_process")
def test_an_import_that_fails_leaves_nothing_in_the_way_of_the_next(tmp_path):
    path = tmp_path / "small_net.py"
    path.write_text(SMALL.format(**FINE))
    to = tmp_path / "s.toml"
    values = {"model_file": str(path), "to": to, "from_script": None, "ranks": 4, "driver": None}
    with pytest.raises(N3LOError, match="kappa"):
        import_nnlo({**values, "gem_kappa": -1.0})
    assert not to.exists()
    import_nnlo(values)
    assert load(to).study.name == "small_net"
    with pytest.raises(N3LOError, match="delete it, or write another by --to FILE"):
        import_nnlo({**values, "epochs": 3})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (None, "name NNLO's model file"),
        ("mnist_arch.json", "keras.models.model_from_json"),
        ("model.pkl", "a pickled model can run anything"),
    ],
)
def test_what_is_no_model_file_is_explained(name, said, tmp_path):
    values = {"model_file": name, "to": tmp_path / "s.toml", "from_script": None}
    with pytest.raises(N3LOError, match=re.escape(said)):
        import_nnlo(values)


def test_the_gan_driver_has_studies_of_its_own(tmp_path):
    values = {"to": tmp_path / "s.toml", "from_script": f"mpirun -np 3 {GAN} dummy.json a b"}
    with pytest.raises(N3LOError, match=r"studies/calorimeter_gan_parameter_server\.toml"):
        import_nnlo(values)
    assert (ROOT / "studies/calorimeter_gan_parameter_server.toml").is_file()


@pytest.mark.long  # test_first_ten_minutes.py does the same by the commands of a page
@pytest.mark.campaign
def test_the_two_examples_become_studies_that_plan_and_run(n3lo, tmp_path):
    for name in ("mnist", "jedi"):
        for file in (f"{name}_torch.py", f"run_{name}.sh"):
            (tmp_path / file).write_text((STUDIES / file).read_text())
        made = n3lo(
            "import-nnlo", f"{name}_torch.py", "--from-script", f"run_{name}.sh",
            "--to", f"{name}.toml", "--epochs", 1, env={"N3LO": str(ROOT)},
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
    jedi = load(tmp_path / "jedi.toml").study
    assert jedi.data.targets == "jets[:, -6:-1]"
    assert jedi.data.transforms == {"jetConstituentList": [{"name": "transpose", "axes": [2, 1]}]}
    assert set(jedi.search.space) == {
        f"model.args.{name}" for name in ("hidden", "De", "Do", "fr_act", "fo_act", "fc_act")
    }
    planned = n3lo("plan", "jedi.toml")
    assert planned.returncode == 0, planned.stderr
    assert "20 trials x 1 folds, evolution search" in planned.stdout
    ran = n3lo("run", "mnist.toml", "--trials", 1)
    assert ran.returncode == 0, ran.stderr
    assert "t000-f0 done" in ran.stdout


# -- the page --------------------------------------------------------------------------------------


def row(option: Option) -> str:
    default = "off" if option.default is False else f"`{option.default}`"
    shown = "" if option.default in (None, "") else default
    return f"| `{option.name}` | {shown} | {option.becomes} | {option.remark} |"


def test_the_page_has_every_option_as_the_command_knows_it():
    written = [
        line for line in PAGE.splitlines() if re.match(r"\| `(--|model_json|train_data)", line)
    ]
    assert written == [row(option) for option in (*OF_TRAINING, *OF_OPTIMIZATION, *OF_GAN)]


def test_the_page_has_every_variable():
    for name, (becomes, remark) in ENVIRONMENT.items():
        assert f"| `{name}` | {becomes} | {remark} |" in PAGE


@pytest.mark.usefixtures("in_process")
def test_the_example_of_the_page_is_what_the_command_writes(tmp_path, monkeypatch):
    """All but the place of the data, and the GPU of the host."""
    shown = re.search(r"```toml\n(# Made by.*?)```", PAGE, re.S)
    assert shown is not None
    monkeypatch.setenv("N3LO", str(ROOT))
    monkeypatch.setattr(sys, "meta_path", [nnlo.Finder(), *sys.meta_path])  # skopt takes 2 s
    for file in ("jedi_torch.py", "run_jedi.sh"):
        (tmp_path / file).write_text((STUDIES / file).read_text())
    to = tmp_path / "jedi.toml"
    values = {"model_file": str(tmp_path / "jedi_torch.py"), "to": to, "ranks": None}
    import_nnlo({**values, "from_script": str(tmp_path / "run_jedi.sh"), "driver": None})
    made, example = tomllib.loads(to.read_text()), tomllib.loads(shown[1])
    for content in (made, example):
        del content["data"]["files"], content["layout"]["gpus_per_rank"]
    assert example == made
