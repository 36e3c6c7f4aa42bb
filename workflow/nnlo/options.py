"""Every option that NNLO's drivers had, and what has become of it.

The same table makes the command's help, the words of a shell line, the comments in a study, and the
page docs/coming_from_nnlo.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from apps.contract import N3LOError, Plain

NOTHING: Final = "nothing"  # has come of it
ALWAYS: Final = "always"  # so, without being asked

TRAINING, OPTIMIZATION, GAN = "TrainingDriver.py", "OptimizationDriver.py", "MPIGDriver.py"


@dataclass(frozen=True)
class Option:
    """One option of a driver."""

    name: str  # as it is typed
    default: Plain  # NNLO's; False of a flag
    becomes: str  # keys of the study, ALWAYS, NOTHING, or what else to type
    remark: str  # what is different, and why
    choices: tuple[str, ...] = ()
    kind: type = str  # of its value, where the default does not tell

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def type(self) -> type:
        return self.kind if self.default is None else type(self.default)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        help_text = f"{self.becomes}: {self.remark}".replace("%", "%%")
        if self.default is False:
            parser.add_argument(self.name, dest=self.key, action="store_true", help=help_text)
            return
        parser.add_argument(
            self.name,
            dest=self.key,
            type=self.type,
            choices=self.choices or None,
            help=help_text,
            metavar=None if self.choices else self.type.__name__.upper(),
        )


OF_TRAINING: tuple[Option, ...] = (
    Option("--timeline", False, ALWAYS, "`report` and the notebook show who ran what when"),
    Option("--verbose", False, NOTHING, "NNLO stored it and never used it"),
    Option(
        "--monitor",
        False,
        ALWAYS,
        "not CPU and memory, but where the time goes: computing, sending, reading, waiting",
    ),
    Option(
        "--backend",
        "keras",
        NOTHING,
        "the model is asked: a torch.nn.Module, or a model of Keras 3 on PyTorch",
        ("keras", "torch"),
    ),
    Option(
        "--thread_validation",
        False,
        NOTHING,
        "all ranks share the validation, so that no worker waits for a master",
    ),
    Option(
        "--model",
        None,
        "`model.source`",
        "a .py file; a pickle can run anything and is not read, and for a .json of Keras write a "
        "file whose get_model returns keras.models.model_from_json(text)",
    ),
    Option(
        "--trial-name",
        "train",
        "`name`",
        "behind get_name(), or the name of the model file, if it was given",
    ),
    Option(
        "--train_data",
        None,
        "`data.files`",
        "a text file with a data file in each line; or get_train() of the model file",
    ),
    Option(
        "--val_data",
        None,
        "`data.files`, `data.validation_fraction`",
        "as large a part of all events is held out, by a seed, with equal shares of classes",
    ),
    Option("--features-name", "features", "`data.inputs`", "get_features() of the file wins"),
    Option("--labels-name", "labels", "`data.targets`", "get_labels() of the file wins"),
    Option(
        "--batch",
        100,
        "`training.batch_size`",
        "per rank; divided by --n-processes, whose ranks were given the same batch",
    ),
    Option(
        "--n-masters",
        1,
        "`layout.sub_masters`",
        "above 1, NNLO's first master stood over the others; with gem these never told it "
        "anything, so that it saved the initial weights",
    ),
    Option(
        "--n-processes",
        1,
        "`layout.ranks_per_worker`",
        "each rank has its own part of the batch; in NNLO all had the same one",
    ),
    Option(
        "--max-gpus",
        1,
        "`layout.gpus_per_rank`",
        "0 is a CPU; NNLO ignored all other numbers and took what GPU was free",
    ),
    Option("--master-gpu", False, NOTHING, "NNLO ignored it; masters need no GPU"),
    Option(
        "--synchronous",
        False,
        "`training.exchange.synchronous`, `backup_workers`",
        "95 % of the workers are waited for, as in NNLO, which summed their updates and could wait "
        "for ever; here it is their mean; OptimizationDriver.py took it and never used it",
    ),
    Option("--epochs", 1, "`training.epochs`", "an epoch is each event once, whoever trains on it"),
    Option(
        "--loss",
        "binary_crossentropy",
        "`training.loss`",
        "with torch, NNLO took cross entropy for each name that it did not know: its own default, "
        "mse and mae among them",
    ),
    Option(
        "--early-stopping",
        None,
        "`training.early_stopping`",
        "patience counts epochs without a better one; NNLO compared means over so many epochs, and "
        "without ~ never stopped",
    ),
    Option("--target-metric", None, "`training.target`", "as in `val_acc,>,0.97`"),
    Option(
        "--worker-optimizer",
        "adam",
        "`training.optimizer`",
        "of easgd, and of a training on one rank; with downpour and gem workers send gradients, "
        "where NNLO sent this optimizer's steps to another optimizer",
    ),
    Option(
        "--worker-optimizer-params",
        "{}",
        "`training.optimizer`",
        "with the names of torch.optim; those of Keras are translated, clipnorm becomes "
        "`training.clip_norm`, and what has no counterpart is said",
    ),
    Option(
        "--sync-every",
        1,
        "`training.exchange.sync_every`",
        "of downpour and easgd; gem exchanges after every batch, where NNLO's waited for so many",
    ),
    Option(
        "--mode",
        "gem",
        "`training.strategy`",
        "one rank alone is `local`; think of `allreduce`, which needs no master",
        ("downpour", "easgd", "gem"),
    ),
    Option(
        "--gem-lr",
        0.01,
        "`training.optimizer.lr`",
        "multiplies gradients; in NNLO it multiplied steps of the worker's optimizer, which were "
        "small with adam: it may need another value",
    ),
    Option("--gem-momentum", 0.9, "`training.optimizer.momentum`", "the same"),
    Option(
        "--gem-kappa", 2.0, "`training.exchange.kappa`", "the same, and the first update counts"
    ),
    Option(
        "--elastic-force",
        0.9,
        "`training.exchange.elastic_force`",
        "divided by a master's workers; NNLO divided it by all ranks of a block but one, and the "
        "value is changed so that the quotient is the same; at most 1",
    ),
    Option("--elastic-lr", 1.0, NOTHING, "NNLO never used it; the rate is that of the optimizer"),
    Option("--elastic-momentum", 0.0, NOTHING, "NNLO never used it; give the optimizer a momentum"),
    Option(
        "--optimizer",
        "adam",
        "`training.optimizer`",
        "the master's, of downpour; it gets gradients",
    ),
    Option("--preload-data", 0, ALWAYS, "data are in memory where they fit, else read ahead"),
    Option(
        "--cache-data",
        "",
        "`data.cache`",
        "copied once a node, and kept; NNLO removed the copies after each training",
    ),
    Option("--copy-command", None, "`data.copy_command`", "run without a shell"),
    Option("--log-file", None, ALWAYS, "each task has its own: `logs t003-f1`"),
    Option("--log-level", "info", NOTHING, "a failed task has its reason in the ledger"),
    Option("--output", "./", "`--runs FOLDER`", "of NNLO's later package; an option of `run`"),
    Option(
        "--restore",
        None,
        ALWAYS,
        "the same command goes on where it was; weights that NNLO saved are pickles, not read",
    ),
    Option("--checkpoint", None, ALWAYS, "with optimizers, random numbers and place in the data"),
    Option("--checkpoint-interval", 5, ALWAYS, "after each epoch"),
)

OF_OPTIMIZATION: tuple[Option, ...] = (
    Option(
        "--block-size",
        2,
        "`layout.num_workers`, `search.num_parallel`",
        "N = 1 + blocks x block size: as many trials at once as there were blocks; the coordinator "
        "is the driver, and needs no rank",
    ),
    Option(
        "--n-fold",
        1,
        "`data.folds`",
        "folds are of events and not of files, and each is a task of its own",
    ),
    Option(
        "--num-iterations",
        10,
        "`search.num_trials`",
        "times --ga-populations with genetic, where NNLO counted generations",
    ),
    Option(
        "--hyper-opt",
        "bayesian",
        "`search.method`",
        "bayesian, or evolution; skopt, which NNLO used, is a method too",
        ("bayesian", "genetic"),
    ),
    Option("--ga-populations", 10, "`search.options.population`", "at least 4"),
    Option("--opt-restore", False, ALWAYS, "the same command goes on where it was"),
    Option(
        "--target-objective",
        None,
        "`search.stop.value`",
        "of val_accuracy, which is 1 minus NNLO's figure of merit; not of another objective; "
        "genetic searches too",
        kind=float,
    ),
    Option(
        "--example",
        "mnist",
        "studies/nnlo",
        "a digits and a jets model; gan is studies/calorimeter_gan_bayesian.toml",
        ("topclass", "mnist", "gan", "cifar10"),
    ),
)

# Of MPIGDriver.py, where they differ. Its one model comes with a study of its own.
OF_GAN: tuple[Option, ...] = (
    Option("model_json", None, "`model.source`", "NNLO ignored it; apps.models.calorimeter_gan"),
    Option("train_data, val_data", None, "`data.files`", "as --train_data and --val_data"),
    Option("--tf", False, NOTHING, "the network is written in PyTorch"),
    Option("--profile", False, NOTHING, "NNLO never used it"),
    Option("--masters", 1, "`layout.sub_masters`", "as --n-masters"),
    Option("--max-gpus", -1, "`layout.gpus_per_rank`", "as in the other drivers"),
    Option("--worker-optimizer", "sgd", "`training.optimizer`", "as in the other drivers"),
    Option("--mode", "downpour", "`training.strategy`", "with gem, that driver ended at once"),
)

# What was set around the line.
ENVIRONMENT: Mapping[str, tuple[str, str]] = {
    "NNLO_SHORT_BATCHES": ("`data.train_fraction`", "an epoch of a part of the events"),
    "DATA_CACHE": ("`data.cache`", "or the variable where n3lo runs, which reads it as NNLO did"),
    "DATA_COPY_COMMAND": (
        "`data.copy_command`",
        "or the variable where n3lo runs, which reads it as NNLO did",
    ),
    "HOST": (NOTHING, "paths are in the study"),
    "GANONEPASS": (
        "`model.args.generator_steps`",
        "moves of the generator in a step: 2 as in NNLO's two passes, or 1",
    ),
    "GANREVERSED": (NOTHING, "the discriminator moves first"),
    "GANCHECKPOINT": (ALWAYS, "after each epoch"),
    "GANCHECKPOINTLOC": (ALWAYS, "in the task's folder"),
}

OPTIONS: Mapping[str, Option] = {each.key: each for each in (*OF_TRAINING, *OF_OPTIMIZATION)}


@dataclass(frozen=True)
class Given:
    """What the user said to NNLO."""

    values: Mapping[str, Any]  # by `Option.key`; None or False = not given

    def __getitem__(self, key: str) -> Any:
        return OPTIONS[key].default if not self.has(key) else self.values[key]

    def has(self, key: str) -> bool:
        value = self.values.get(key)
        return value is not None and value is not False  # a 0 was given

    def said(self, *keys: str) -> str:
        """The options, as a comment names where a value comes from."""
        return ", ".join(self._said(key) for key in keys)

    def _said(self, key: str) -> str:
        name, default = OPTIONS[key].name, OPTIONS[key].default
        if self.has(key):
            return name if self.values[key] is True else f"{name} {self.values[key]}"
        return f"{name} {default} (default)" if default else f"{name} (not given)"

    def idle(self) -> list[str]:
        """A line for each option that was given and that the study has no key for."""
        return [
            f"{option.name}: {option.becomes}: {option.remark}"
            for option in OPTIONS.values()
            if self.has(option.key) and option.becomes in (NOTHING, ALWAYS, "`--runs FOLDER`")
        ]


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise N3LOError(f"the words of NNLO's line: {message}")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Offer all options of NNLO, as words of a command."""
    for option in OPTIONS.values():
        option.add_to(parser)


def parse(words: Iterable[str]) -> Given:
    """The words behind a driver's name; may be shortened, as NNLO's documents do.

    Raises:
        N3LOError: NNLO would not have taken them.
    """
    parser = _Words(prog="NNLO", add_help=False)
    add_to(parser)
    return Given(vars(parser.parse_args(list(words))))
