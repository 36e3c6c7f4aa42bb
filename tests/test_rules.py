"""Choices that are valid alone and not together: one line each, before any job is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import classes_h5, launch, make_task, write_task

from apps.check import check
from apps.contract import Layout, N3LOError, Training, TrainTask, from_dict, read_json
from apps.experiment import LARGE_BATCH, make_optimizer
from apps.rules import DRAW_RANDOM_NUMBERS, USED_BY, check_ranks, check_used
from workflow.study import load

Values = dict[str, Any]  # by dotted path, without "training."


def sections(values: Values) -> tuple[Training, Layout]:
    content: dict[str, Any] = {"layout": {}}
    for path, value in values.items():
        *above, last = path.split(".")
        section = content
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    layout = content.pop("layout")
    return from_dict(Training, content), Layout(**layout)


# -- from the settings alone -----------------------------------------------------------------------

DDP = {"strategy": "allreduce", "backend": "ddp", "layout.num_workers": 2}
HOROVOD = {**DDP, "backend": "horovod"}
LOCAL_SGD = {**DDP, "reduction.average_every": 4}
TENSOR = {"strategy": "tensor", "layout.ranks_per_worker": 2}
STAGES = {"strategy": "pipeline", "layout.ranks_per_worker": 2}
SHARDED = {"strategy": "sharded", "layout.ranks_per_worker": 2}
DOWNPOUR = {"strategy": "downpour", "optimizer": {"name": "sgd", "lr": 0.1}}
COSINE = {"name": "cosine_annealing_lr"}
WARM_UP = {"name": "linear_lr", "epochs": 2}
PLATEAU = {"name": "reduce_lr_on_plateau"}
ONE_CYCLE = {"name": "one_cycle_lr", "max_lr": 0.1, "epochs": 10}

# What is broken, the values that mend it, the line.
BROKEN: list[tuple[Values, Values, str]] = [
    # precision
    *(
        (
            {"precision": precision},
            {"layout.gpus_per_rank": 1},
            f"training.precision: '{precision}' is arithmetic of GPUs, and layout.gpus_per_rank = "
            "0; on a CPU use 'bf16' or 'fp32'",
        )
        for precision in ("fp16", "tf32")
    ),
    *(
        (
            {**way, "precision": "fp16", "layout.gpus_per_rank": 1},
            {"precision": "bf16"},
            f"training.precision: 'fp16' needs its loss scaled, which '{way['strategy']}' does not "
            "do; use 'bf16'",
        )
        for way in (TENSOR, STAGES, DOWNPOUR)
    ),
    (
        {**DDP, "layout.gpus_per_rank": 1, "precision": "fp16", "reduction.compression": "topk"},
        {"reduction.compression": "fp16"},
        "training.precision: 'fp16' scales gradients, and 'topk' keeps what it did not send in the "
        "old scale; use 'bf16', or compression = 'fp16'",
    ),
    # ranks and GPUs
    (
        {"layout.num_workers": 2},
        {"strategy": "allreduce"},
        "training.strategy: 'local' trains on one rank, and the layout has 2; use 'allreduce'",
    ),
    (
        {"layout.ranks_per_worker": 3},
        {"layout.ranks_per_worker": 1},
        "training.strategy: 'local' trains on one rank, and the layout has 3; use 'allreduce'",
    ),
    *(
        (
            {**way, "layout.ranks_per_worker": 2, "layout.ranks_per_stage": 2},
            {"strategy": "pipeline", "optimizer": {"name": "adam"}},
            f"layout.ranks_per_stage: '{way['strategy']}' has no stages; leave it out, or set "
            "training.strategy = 'pipeline'",
        )
        for way in (DDP, TENSOR, DOWNPOUR)
    ),
    *(
        (
            {**way, "layout.gpus_per_rank": 2},
            {"layout.gpus_per_rank": 1},
            f"layout.gpus_per_rank: '{way['strategy']}' uses one GPU a rank; set it to 1 and take "
            "more ranks (several are of 'local' and 'allreduce', which then divide the layers "
            "between them)",
        )
        for way in (TENSOR, STAGES, SHARDED, DOWNPOUR)
    ),
    # layers
    (
        {**STAGES, "split.tensor": {"phi.*": "column"}},
        {"split.tensor": {}},
        "training.split.tensor: one rank a stage divides no layers; set layout.ranks_per_stage, or "
        "leave it out",
    ),
    *(
        (
            {**DDP, "reduction": {"compression": "topk", "topk_momentum": 0.9}, **others},
            {"optimizer": {"name": "sgd", "lr": 0.1}, "clip_norm": None},
            "training.reduction.topk_momentum: is the momentum of plain SGD, before gradients are "
            "sent; set training.optimizer to { name = 'sgd' } without momentum, and no clip_norm",
        )
        for others in (
            {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5}},
            {"optimizer": {"name": "adam"}},
            {"optimizer": {"name": "sgd", "lr": 0.1}, "clip_norm": 1.0},
        )
    ),
    (
        {**STAGES, "sync_batchnorm": True},
        {"strategy": "sharded"},
        "training.sync_batchnorm: a pipeline normalises each micro-batch; use 'allreduce' or "
        "'sharded', or leave it out",
    ),
    (
        {**DOWNPOUR, "sync_batchnorm": True, "layout.num_workers": 2},
        {"strategy": "allreduce"},
        "training.sync_batchnorm: the workers of 'downpour' do not wait for each other; use "
        "'allreduce' or 'sharded', or leave it out",
    ),
    (
        {**STAGES, "recompute": ["*"]},
        {"strategy": "sharded"},
        "training.recompute: a pipeline keeps activations of few micro-batches already; raise "
        "training.split.micro_batches, or use 'sharded'",
    ),
    (
        {"recompute": ["*"], "layout.gpus_per_rank": 2},
        {"layout.gpus_per_rank": 1},
        "training.recompute: needs layout.gpus_per_rank of 0 or 1; for a model too large for one "
        "GPU use 'sharded'",
    ),
    *(
        (
            {**way, "compile": True},
            {"strategy": "sharded", "layout.gpus_per_rank": 1},
            "training.compile: is for 'local', 'allreduce' and 'sharded' with one GPU a rank, not "
            f"for '{way.get('strategy', 'local')}' with layout.gpus_per_rank = "
            f"{way.get('layout.gpus_per_rank', 0)}; set it to false",
        )
        for way in (TENSOR, STAGES, DOWNPOUR, {"layout.gpus_per_rank": 2})
    ),
    *(
        (
            {**way, "cuda_graphs": True},
            {"strategy": "local", "layout.ranks_per_worker": 1, "layout.gpus_per_rank": 1},
            "training.cuda_graphs: is for 'local' with layout.gpus_per_rank = 1, not for "
            f"'{way.get('strategy', 'local')}' with {way.get('layout.gpus_per_rank', 0)}; set it "
            "to false",
        )
        for way in (TENSOR, DOWNPOUR, {"layout.gpus_per_rank": 2})
    ),
    *(
        (
            {**way, "cuda_graphs": True, "layout.gpus_per_rank": 1},
            {"cuda_graphs": False},
            f"training.cuda_graphs: does not go with training.{other}; set it to false, or change "
            "that",
        )
        for other, way in (
            ("compile", {"compile": True}),
            ("recompute", {"recompute": ["*"]}),
            ("accumulate", {"accumulate": 2}),
            ("precision = 'fp16'", {"precision": "fp16"}),
        )
    ),
    # stages
    (
        {**STAGES, "layout.ranks_per_worker": 6},
        {"split.schedule": "gpipe"},
        "training.split.micro_batches: 4 are too few for the 6 stages of schedule '1f1b'; set it "
        "to at least 6, or use 'gpipe'",
    ),
    (
        {**STAGES, "layout.ranks_per_worker": 6},
        {"layout.ranks_per_stage": 2},
        "training.split.micro_batches: 4 are too few for the 6 stages of schedule '1f1b'; set it "
        "to at least 6, or use 'gpipe'",
    ),
    (
        {**STAGES, "batch_size": 3},
        {"batch_size": 4},
        "training.split.micro_batches: 4 are more than the 3 events of a batch; raise "
        "training.batch_size, or set it lower",
    ),
    (
        {**STAGES, "split.stages": ["rho", "head"]},
        {"layout.ranks_per_worker": 3},
        "training.split.stages: 2 names, but the ranks of a worker are 2 stages; name the "
        "module that begins each stage after the first, or none",
    ),
    # optimizers
    *(
        (
            {**way, "optimizer": {"name": name}},
            {"strategy": "allreduce"},
            f"training.optimizer: '{name}' needs whole layers, and '{way['strategy']}' divides "
            "them; use 'allreduce', or another optimizer",
        )
        for way, name in (
            *((TENSOR, name) for name in ("muon", "adafactor", "soap", "shampoo", "lars", "lamb")),
            *((SHARDED, name) for name in ("muon", "adafactor", "scalableshampoo", "lamb")),
        )
    ),
    (
        {**STAGES, "layout.ranks_per_stage": 2, "optimizer": {"name": "Scalable_Shampoo"}},
        {"layout.ranks_per_stage": 1},
        "training.optimizer: 'scalableshampoo' needs whole layers, and 'pipeline' divides them; "
        "use 'allreduce', or another optimizer",
    ),
    (
        {**TENSOR, "optimizer": {"name": "lars"}},
        {"strategy": "sharded"},
        "training.optimizer: 'lars' needs whole layers, and 'tensor' divides them; use "
        "'allreduce', or another optimizer",
    ),
    *(
        (
            {**way, "optimizer": {"name": "kron"}},
            {"optimizer": {"name": "soap"}},
            "training.optimizer: 'kron' draws random numbers, other ones on each rank, so that "
            "the weights would part; train on one rank, or use 'soap'",
        )
        for way in (DDP, STAGES)
    ),
    (
        {**STAGES, "optimizer": {"name": "lamb", "pre_norm": True}},
        {"optimizer": {"name": "lamb"}, "clip_norm": 1.0},
        "training.optimizer: pre_norm needs the norm of the whole gradient, and each stage of a "
        "pipeline has a part; leave it out, and set training.clip_norm",
    ),
    # updates
    *(
        (
            {**DOWNPOUR, "strategy": strategy, "accumulate": 2},
            {"strategy": "local"},
            f"training.accumulate: '{strategy}' has its own way; set training.exchange.sync_every",
        )
        for strategy in ("downpour", "easgd", "gem")
    ),
    (
        {**STAGES, "accumulate": 2},
        {"strategy": "tensor"},
        "training.accumulate: a pipeline accumulates over its micro-batches; raise "
        "training.batch_size and training.split.micro_batches",
    ),
    (
        {**DOWNPOUR, "schedule_per": "update"},
        {"schedule_per": "epoch"},
        "training.schedule_per: 'downpour' has no common count of updates; use 'epoch'",
    ),
    *(
        (
            {"scheduler": scheduler, "schedule_per": per},
            {"scheduler": PLATEAU, "schedule_per": "epoch"},
            "training.scheduler: 'reduce_lr_on_plateau' waits for the validation loss: it goes "
            "alone, and per epoch",
        )
        for scheduler, per in (
            (PLATEAU, "update"),
            ([WARM_UP, PLATEAU], "epoch"),
            ([{**PLATEAU, "epochs": 2}, COSINE], "epoch"),
        )
    ),
    *(
        (
            {"scheduler": scheduler},
            {"scheduler": ONE_CYCLE},
            "training.scheduler: 'one_cycle_lr' changes what the others begin from, and has a "
            "warm-up of its own: it goes alone",
        )
        for scheduler in ([WARM_UP, ONE_CYCLE], [ONE_CYCLE, COSINE])
    ),
    *(
        (
            {"scheduler": {**COSINE, "epochs": epochs}},
            {"scheduler": {**COSINE, "epochs": 5}},
            f"training.scheduler: 'cosine_annealing_lr' cannot last epochs = {epochs!r}; it must "
            "be a whole number, at least 1",
        )
        for epochs in (0, 2.5, "five", True)
    ),
    *(
        (
            {"scheduler": scheduler, "lr_scaling": "linear"},
            {"scheduler": COSINE},
            f"training.lr_scaling: '{name}' has learning rates of its own, which are not scaled; "
            "scale its max_lr by hand, and set it to 'none'",
        )
        for name, scheduler in (
            ("one_cycle_lr", ONE_CYCLE),
            ("CyclicLR", {"name": "CyclicLR", "base_lr": 0.1, "max_lr": 0.2}),
        )
    ),
    # the mean of gradients
    *(
        (
            {**HOROVOD, "reduction.compression": compression},
            {"backend": "ddp"},
            f"training.reduction.compression: Horovod sends 'none' or 'fp16', not '{compression}'; "
            "set training.backend = 'ddp'",
        )
        for compression in ("bf16", "powersgd", "topk")
    ),
    (
        {**LOCAL_SGD, "reduction.compression": "fp16"},
        {"layout.ranks_per_worker": 2},
        "training.reduction.compression: workers of one rank that average their weights "
        "(average_every) send no gradients; set layout.ranks_per_worker, or leave it out",
    ),
    (
        {**HOROVOD, "reduction.hierarchical": True},
        {"backend": "ddp"},
        "training.reduction.hierarchical: needs training.backend = 'ddp'",
    ),
    *(
        (
            {**DDP, "reduction.hierarchical": True, "reduction.compression": compression},
            {"reduction.compression": "bf16"},
            f"training.reduction.hierarchical: sends whole gradients, not '{compression}'; choose "
            "none, fp16 or bf16",
        )
        for compression in ("powersgd", "topk")
    ),
    (
        {**LOCAL_SGD, "reduction.hierarchical": True},
        {"reduction.average_every": 1},
        "training.reduction.hierarchical: workers that average their weights (average_every) do "
        "not average gradients; choose one",
    ),
    (
        {"schedule_per": "update"},
        {"scheduler": {"name": "exponential_lr", "gamma": 0.9}},
        "training.schedule_per: there is no schedule; set training.scheduler, or leave it out",
    ),
    (
        {**LOCAL_SGD, "layout.gpus_per_rank": 2},
        {"layout.gpus_per_rank": 1},
        "training.reduction.average_every: needs layout.gpus_per_rank of 0 or 1: weights are "
        "averaged in one piece",
    ),
    (
        {**DDP, "reduction.operation": "adasum"},
        {"backend": "horovod"},
        "training.reduction.operation: 'adasum' is Horovod's; set training.backend = 'horovod'",
    ),
    (
        {**HOROVOD, "reduction.operation": "adasum", "layout.num_workers": 3},
        {"layout.num_workers": 4},
        "training.reduction.operation: 'adasum' pairs ranks, and 3 is not a power of 2; use "
        "'average'",
    ),
    (
        {**HOROVOD, "reduction.operation": "adasum", "reduction.average_every": 2},
        {"reduction.average_every": 1},
        "training.reduction.operation: 'adasum' is over all ranks at each update; set "
        "average_every = 1",
    ),
]


@pytest.mark.parametrize(("broken", "mends", "line"), BROKEN)
def test_what_does_not_go_together_is_one_line_with_the_way_out(broken, mends, line):
    with pytest.raises(ValueError, match=r"\S") as caught:
        check_ranks(*sections(broken))
    assert str(caught.value) == line
    check_ranks(*sections({**broken, **mends}))


WAYS = [{}, DDP, HOROVOD, LOCAL_SGD, SHARDED, TENSOR, STAGES, DOWNPOUR]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_each_strategy_is_for_goes_together(way):
    check_ranks(*sections(way))


def test_options_that_others_have_do_not_matter_to_a_strategy():
    check_ranks(*sections({"backend": "ddp", "reduction.operation": "adasum"}))
    check_ranks(*sections({**TENSOR, "split.micro_batches": 1, "split.stages": ["head"]}))


def moved_by(name: str, seed: int) -> torch.Tensor:
    """A weight after three updates with the same gradients, by an optimizer with this seed."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3))
    gradients = torch.randn(3, 4, 3)
    optimizer = make_optimizer({"name": name, "lr": 0.1}, [weight])
    torch.manual_seed(seed)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("name", [name.lower() for name in LARGE_BATCH])
def test_ranks_with_other_random_numbers_part_only_where_it_is_said(name):
    alike = torch.equal(moved_by(name, seed=1), moved_by(name, seed=2))
    assert alike == (name not in DRAW_RANDOM_NUMBERS)


# -- options that nothing reads --------------------------------------------------------------------

UNUSED: list[tuple[Values, str]] = [
    (
        {**SHARDED, "reduction.compression": "powersgd"},
        "training.reduction.compression: 'sharded' does not use it; leave it out (it is for "
        "allreduce)",
    ),
    (
        {**DDP, "reduction.compression": "topk", "reduction.powersgd_rank": 4},
        "training.reduction.powersgd_rank: 'topk' does not use it; leave it out (it is for "
        "powersgd)",
    ),
    (
        {**DDP, "reduction.topk_density": 0.1},
        "training.reduction.topk_density: 'none' does not use it; leave it out (it is for topk)",
    ),
    (
        {**DDP, "reduction.compression": "powersgd", "reduction.topk_momentum": 0.9},
        "training.reduction.topk_momentum: 'powersgd' does not use it; leave it out (it is for "
        "topk)",
    ),
    (
        {**SHARDED, "backend": "ddp"},
        "training.backend: 'sharded' does not use it; leave it out (it is for allreduce, downpour, "
        "easgd, gem)",
    ),
    (
        {**TENSOR, "split.micro_batches": 8},
        "training.split.micro_batches: 'tensor' does not use it; leave it out (it is for pipeline)",
    ),
    (
        {**DDP, "split.tensor": {"phi.*": "column"}},
        "training.split.tensor: 'allreduce' does not use it; leave it out (it is for tensor, "
        "pipeline)",
    ),
    (
        {**STAGES, "split.unit_parameters": 10},
        "training.split.unit_parameters: 'pipeline' does not use it; leave it out (it is for "
        "sharded)",
    ),
    (
        {**DDP, "exchange.sync_every": 8},
        "training.exchange.sync_every: 'allreduce' does not use it; leave it out (it is for "
        "downpour, easgd, gem)",
    ),
    (
        {**DOWNPOUR, "exchange.elastic_force": 0.5},
        "training.exchange.elastic_force: 'downpour' does not use it; leave it out (it is for "
        "easgd)",
    ),
    (
        {**DDP, "layout.sub_masters": [2]},
        "layout.sub_masters: 'allreduce' does not use it; leave it out (it is for downpour, "
        "easgd, gem)",
    ),
]


@pytest.mark.parametrize(("values", "line"), UNUSED)
def test_an_option_that_does_nothing_is_refused_unless_its_user_is_searched(values, line):
    with pytest.raises(ValueError, match="does not use it") as caught:
        check_used(*sections(values), searched=["training.optimizer.lr"])
    assert str(caught.value) == line
    chooser, _ = USED_BY[line.partition(":")[0]]
    check_used(*sections(values), searched=[chooser])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_defaults_are_never_refused(way):
    check_used(*sections(way), searched=[])


def test_every_option_of_reduction_split_and_exchange_has_its_users():
    training, _ = sections({})
    for name in ("reduction", "split", "exchange"):
        options = {f"training.{name}.{option}" for option in vars(getattr(training, name))}
        assert options <= set(USED_BY)


# -- in a study ------------------------------------------------------------------------------------


def error_of(path: Path) -> str:
    with pytest.raises(N3LOError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def line_of(path: Path, key: str) -> int:
    """The number of the first line that gives a key a value."""
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.startswith(f"{key} ="))


STRATEGY, LAYOUT = 'strategy = "local"', "walltime_min = 2"


# What the study says, and the key whose line is named.
IN_STUDY = [
    (
        'strategy = "local"\nprecision = "fp16"',
        "",
        "precision",
        "training.precision: 'fp16' is arithmetic of GPUs, and layout.gpus_per_rank = 0; on a CPU "
        "use 'bf16' or 'fp32'",
    ),
    (
        'strategy = "local"',
        "num_workers = 2",
        "strategy",
        "training.strategy: 'local' trains on one rank, and the layout has 2; use 'allreduce'",
    ),
    (
        'strategy = "tensor"',
        "gpus_per_rank = 2",
        "gpus_per_rank",
        "layout.gpus_per_rank: 'tensor' uses one GPU a rank; set it to 1 and take more ranks "
        "(several are of 'local' and 'allreduce', which then divide the layers between them)",
    ),
    (
        'strategy = "pipeline"\nsync_batchnorm = true',
        "ranks_per_worker = 2",
        "sync_batchnorm",
        "training.sync_batchnorm: a pipeline normalises each micro-batch; use 'allreduce' or "
        "'sharded', or leave it out",
    ),
    (
        'strategy = "allreduce"\nreduction = { operation = "adasum" }',
        "num_workers = 3",
        "reduction",
        "training.reduction.operation: 'adasum' pairs ranks, and 3 is not a power of 2; use "
        "'average'",
    ),
    (
        'strategy = "pipeline"',
        "ranks_per_worker = 4\nranks_per_stage = 3",
        "ranks_per_stage",
        "layout: ranks_per_stage: 3 does not divide ranks_per_worker = 4, which are stages x "
        "ranks_per_stage",
    ),
    (
        'strategy = "local"\nscheduler = [{ name = "linear_lr" }, { name = "step_lr" }]',
        "",
        "scheduler",
        "training: scheduler: 'linear_lr' is followed by another and needs its length, as in "
        "epochs = 5",
    ),
]


@pytest.mark.parametrize(("training", "layout", "key", "said"), IN_STUDY)
def test_a_study_says_it_with_file_and_line(edit, training, layout, key, said):
    edit(STRATEGY, training)
    path = edit(LAYOUT, f"{LAYOUT}\n{layout}")
    assert error_of(path) == f"{path}:{line_of(path, key)}: {said}"


def test_a_learning_rate_that_is_scaled_must_be_given(edit):
    edit(STRATEGY, 'strategy = "local"\nlr_scaling = "sqrt"')
    edit('"training.optimizer.lr" = { type = "real", low = 1e-3, high = 1.0, log = true }\n', "")
    path = edit('{ name = "sgd", lr = 0.1 }', '{ name = "sgd" }')
    assert error_of(path) == (
        f"{path}:{line_of(path, 'lr_scaling')}: training: lr_scaling: scales the learning rate of "
        "one rank; give it as optimizer.lr"
    )


# The study, two dimensions that are valid one by one, what is said, and two ways to mend it.
SEARCHED = [
    (
        'strategy = "allreduce"\nbackend = "ddp"',
        "gpus_per_rank = 1",
        ("training.precision", ["bf16", "fp16"]),
        ("training.strategy", ["allreduce", "tensor"]),
        "'training.precision' = 'fp16', 'training.strategy' = 'tensor' do not go together: "
        "training.precision: 'fp16' needs its loss scaled, which 'tensor' does not do; use 'bf16'",
    ),
    (
        'strategy = "allreduce"\nbackend = "ddp"',
        "num_workers = 2",
        ("training.reduction.compression", ["none", "powersgd"]),
        ("training.backend", ["ddp", "horovod"]),
        "'training.reduction.compression' = 'powersgd', 'training.backend' = 'horovod' do not go "
        "together: training.reduction.compression: Horovod sends 'none' or 'fp16', not "
        "'powersgd'; set training.backend = 'ddp'",
    ),
    (
        'strategy = "allreduce"\nbackend = "ddp"',
        "ranks_per_worker = 2",
        ("training.accumulate", [1, 2]),
        ("training.strategy", ["allreduce", "pipeline"]),
        "'training.accumulate' = 2, 'training.strategy' = 'pipeline' do not go together: "
        "training.accumulate: a pipeline accumulates over its micro-batches; raise "
        "training.batch_size and training.split.micro_batches",
    ),
    (
        'strategy = "allreduce"',
        "",
        ("layout.num_workers", [1, 2]),
        ("training.strategy", ["allreduce", "local"]),
        "'layout.num_workers' = 2, 'training.strategy' = 'local' do not go together: "
        "training.strategy: 'local' trains on one rank, and the layout has 2; use 'allreduce'",
    ),
]


def searched(edit, case, when: str = "", constraint: str = "") -> Path:
    training, layout, (first, values), (second, others), _ = case
    edit(STRATEGY, training)
    edit(LAYOUT, f"{LAYOUT}\n{layout}")
    if constraint:
        edit("num_trials = 3", f'num_trials = 3\nconstraints = ["{constraint}"]')
    return edit(
        '"model.args.width" =',
        f'"{first}" = {{ type = "choice", values = {values}{when} }}\n'
        f'"{second}" = {{ type = "choice", values = {others} }}\n"model.args.width" =',
    )


@pytest.mark.parametrize(
    "case", SEARCHED, ids=[f"{first}, {second}" for _, _, (first, _), (second, _), _ in SEARCHED]
)
class TestASearchedCombination:
    def test_is_refused_at_load_with_two_ways_out(self, edit, case):
        path = searched(edit, case)
        assert error_of(path).endswith(f": {case[-1]}; add a constraint, or 'when'")
        assert "search.space: " in error_of(path)

    def test_is_accepted_where_a_condition_excludes_it(self, edit, case):
        _, _, _, (second, others), _ = case
        path = searched(edit, case, when=f', when = {{ "{second}" = ["{others[0]}"] }}')
        assert load(path).space

    def test_is_accepted_where_a_constraint_excludes_it(self, edit, case):
        _, _, (first, values), (second, others), _ = case
        wrong = f"'{values[1]}'" if isinstance(values[1], str) else values[1]
        constraint = f"{first} != {wrong} or {second} != '{others[1]}'"
        assert load(searched(edit, case, constraint=constraint)).space


# -- with the model and the data at hand -----------------------------------------------------------

MODELS = """\
import torch
from torch import nn


class Own(nn.BatchNorm1d):
    pass


class Net(nn.Module):
    def __init__(self, norm="none"):
        super().__init__()
        norms = {"none": nn.Identity, "batch": nn.BatchNorm1d, "own": Own}
        self.first = nn.Linear(3, 8)
        self.norm = norms[norm](8) if norm != "none" else nn.Identity()
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).relu()).relu())


class Matrix(nn.Module):  # nothing to split, nowhere to cut
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return x @ self.matrix


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * super().forward(x)


class Mode(Net):  # another arithmetic in training
    def forward(self, x):
        return super().forward(2 * x if self.training else x)
"""


@pytest.fixture
def task(tmp_path):
    def made(model: str = "Net", args: Values | None = None, **sections: Any) -> TrainTask:
        (tmp_path / "my_nets.py").write_text(MODELS)
        source = {"source": f"{tmp_path / 'my_nets.py'}:{model}", "args": args or {}}
        files = [classes_h5(tmp_path / "events.h5")]
        return make_task(files, model=source, **sections)

    return made


def asks(**values: Any) -> dict[str, Any]:
    """Sections of a task."""
    layout = values.pop("layout", {})
    return {"training": values, "layout": layout}


TWO = {"ranks_per_worker": 2}
NOT_FIT: dict[str, tuple[str, Values, dict[str, Any], str]] = {
    "a model with nothing to split": (
        "Matrix", {},
        asks(strategy="tensor", layout=TWO),
        "training.strategy: 'tensor' splits Linear and Embedding layers, and this model has none "
        "that 2 ranks can share; use 'pipeline' or 'sharded'",
    ),
    "more ranks than columns": (
        "Net", {},
        asks(strategy="tensor", layout={"ranks_per_worker": 9}),
        "training.strategy: 'tensor' splits Linear and Embedding layers, and this model has none "
        "that 9 ranks can share; use 'pipeline' or 'sharded'",
    ),
    "a pattern without a layer": (
        "Net", {},
        asks(strategy="tensor", layout=TWO, split={"tensor": {"phi": "column"}}),
        "training.split.tensor: 'phi' = 'column': of Linear and Embedding layers there is first, "
        "second, head",
    ),
    "a style that is none": (
        "Net", {},
        asks(strategy="tensor", layout=TWO, split={"tensor": {"first": "columns"}}),
        "training.split.tensor: 'first' = 'columns': there is column, row, column_gathered",
    ),
    "a model with too few places to cut": (
        "Net", {},
        asks(strategy="pipeline", layout={"ranks_per_worker": 4}),
        "layout.ranks_per_worker: 4 stages, but this model can be cut into at most 3, each with "
        "parameters to train and only tensors passing on; take 3 or fewer",
    ),
    "a module that is not there": (
        "Net", {},
        asks(strategy="pipeline", layout=TWO, split={"stages": ["tail"]}),
        "training.split.stages: there is no module 'tail', only first, norm, second, head",
    ),
    "a model that a record loses": (
        "Mode", {},
        asks(strategy="pipeline", layout=TWO),
        "training.strategy: 'pipeline' cannot cut this model: Mode.forward does what a record of "
        "it loses (self.training, torch.no_grad, autocast or random numbers of its own); use "
        "'sharded' or 'allreduce'",
    ),
    "stages with nothing to split": (
        "Matrix", {},
        asks(
            strategy="pipeline",
            layout={"ranks_per_worker": 2, "ranks_per_stage": 2},
        ),
        "layout.ranks_per_stage splits Linear and Embedding layers, and this model has none that "
        "2 ranks can share; set it to 1",
    ),
    "several GPUs for a model that a record loses": (
        "Mode", {},
        asks(layout={"gpus_per_rank": 2}),
        "layout.gpus_per_rank: a rank's GPUs cannot divide this model: Mode.forward does what a "
        "record of it loses (self.training, torch.no_grad, autocast or random numbers of its own); "
        "use 'sharded' with one GPU for each rank",
    ),
    "a parameter that is one number": (
        "Scaled", {},
        asks(strategy="sharded", layout=TWO),
        "training.strategy: 'sharded' divides parameters, and 'scale' is a single number; give it "
        "the shape (1,), or use 'allreduce'",
    ),
    "several GPUs for one layer": (
        "Matrix", {},
        asks(layout={"gpus_per_rank": 2}),
        "layout.gpus_per_rank: 2 stages, but this model can be cut into at most 1, each with "
        "parameters to train and only tensors passing on; take 1",
    ),
    "a layer to recompute that is not there": (
        "Net", {},
        asks(recompute=["head", "blocks.*"]),
        "training.recompute: 'blocks.*' matches no layer, only first, norm, second, head",
    ),
    "a BatchNorm of the user's own": (
        "Net", {"norm": "own"},
        asks(sync_batchnorm=True),
        "training.sync_batchnorm: layer 'norm' is a Own; only BatchNorm1d, BatchNorm2d and "
        "BatchNorm3d themselves can be synchronised",
    ),
    "too few events to validate on": (
        "Net", {},
        asks(strategy="allreduce", layout={"num_workers": 42}),
        "data: 41 validation events are too few for 42 ranks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FIT)
def test_what_the_model_cannot_do_is_said_before_a_job(task, name):
    model, args, sections, line = NOT_FIT[name]
    with pytest.raises(N3LOError) as caught:
        check(task(model, args, **sections))
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "sections",
    [
        asks(strategy="tensor", layout=TWO),
        asks(strategy="tensor", layout=TWO, split={"tensor": {"first": "column_gathered"}}),
        asks(strategy="pipeline", layout={"ranks_per_worker": 3}),
        asks(strategy="pipeline", layout=TWO, split={"stages": ["head"]}),
        asks(strategy="pipeline", layout={"ranks_per_worker": 4, "ranks_per_stage": 2}),
        asks(strategy="sharded", layout=TWO, recompute=["head", "f*"]),
        asks(layout={"gpus_per_rank": 3}),
    ],
    ids=str,
)
def test_what_the_model_can_do_passes_without_a_word(task, sections):
    assert check(task(**sections))["warnings"] == []


def test_one_event_in_a_micro_batch_is_too_few_for_batch_norm(task):
    wish = asks(strategy="pipeline", layout=TWO, batch_size=4, split={"micro_batches": 4})
    with pytest.raises(N3LOError) as caught:
        check(task(args={"norm": "batch"}, **wish))
    said = str(caught.value)
    assert said.startswith(
        "training.strategy: 'pipeline' cannot divide this model: ValueError: Expected more than 1 "
        "value per channel when training"
    )
    assert said.endswith("; use 'sharded' or 'allreduce'")
    assert "\n" not in said


def test_the_check_leaves_the_model_as_it_was_built(task):
    plain = check(task(args={"norm": "batch"}))
    wish = asks(sync_batchnorm=True, recompute=["*"])
    assert check(task(args={"norm": "batch"}, **wish)) == plain


BATCH_NORM = "BatchNorm takes its mean and variance from"
WARNED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "sync_batchnorm without BatchNorm": (
        "none",
        asks(strategy="allreduce", sync_batchnorm=True, layout=TWO),
        ["training.sync_batchnorm changes nothing: the model has no BatchNorm"],
    ),
    "BatchNorm on several ranks": (
        "batch",
        asks(strategy="allreduce", layout=TWO),
        [
            f"{BATCH_NORM} the 7 events of each of 2 ranks alone; training.sync_batchnorm = true, "
            "or LayerNorm or GroupNorm would avoid it"
        ],
    ),
    "BatchNorm on one rank": ("batch", asks(), []),
    "BatchNorm on one rank of each worker": (
        "batch",
        asks(strategy="allreduce", reduction={"average_every": 4}, layout={"num_workers": 2}),
        [],
    ),
    "BatchNorm of ranks on the same batch": ("batch", asks(strategy="tensor", layout=TWO), []),
    "BatchNorm that is synchronised": (
        "batch", asks(strategy="sharded", sync_batchnorm=True, layout=TWO), []
    ),
    "BatchNorm of a worker's ranks": (
        "batch",
        asks(strategy="downpour", layout=TWO),
        [
            f"{BATCH_NORM} the 7 events of each of 2 ranks alone; LayerNorm or GroupNorm would "
            "avoid it"
        ],
    ),
    "BatchNorm of pieces": (
        "batch",
        asks(accumulate=2),
        [
            f"{BATCH_NORM} one of the 2 batches of an update at a time; LayerNorm or GroupNorm "
            "would avoid it"
        ],
    ),
    "BatchNorm of micro-batches": (
        "batch",
        asks(strategy="pipeline", layout=TWO, split={"micro_batches": 3}),
        [
            f"{BATCH_NORM} each of 3 micro-batches alone; fewer of them, or 'sharded' with "
            "sync_batchnorm, take more events together; LayerNorm and GroupNorm do not depend on it"
        ],
    ),
    "empty micro-batches": (
        "none",  # 80 events are 3 batches of 27 and less
        asks(strategy="pipeline", layout=TWO, batch_size=32, split={"micro_batches": 30}),
        [
            "training.split.micro_batches: of 30 some are empty, as batches have 27 events; set it "
            "to at most 27"
        ],
    ),
    "local SGD of one worker": (
        "none",
        asks(strategy="allreduce", reduction={"average_every": 4}, layout=TWO),
        [
            "training.reduction.average_every changes nothing: workers average their weights, and "
            "there is one; to let 2 train apart set layout.num_workers = 2 and ranks_per_worker = 1"
        ],
    ),
    "a phase that never begins": (
        "none",  # there are 3 epochs
        asks(scheduler=[{"name": "linear_lr", "epochs": 3}, {"name": "cosine_annealing_lr"}]),
        [
            "training.scheduler: 'cosine_annealing_lr' never begins: there are 3 epochs, and 3 "
            "before it"
        ],
    ),
    "a phase of one epoch": (
        "none",
        asks(scheduler=[{"name": "linear_lr", "epochs": 2}, {"name": "cosine_annealing_lr"}]),
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_what_is_allowed_and_seldom_meant_is_a_warning(task, name):
    norm, sections, lines = WARNED[name]
    assert check(task(args={"norm": norm}, **sections))["warnings"] == lines


# `apps/strategies/__init__.py` imports every strategy, and with them mpi4py, which may crash on a
# login node: to be a plain test when that package imports a strategy only where it is used.
@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_a_model_is_divided_without_mpi(task, tmp_path, strategy):
    path = write_task(tmp_path / "task", task(**asks(strategy=strategy, layout=TWO)))
    program = (
        "import sys; sys.modules['mpi4py'] = None; from apps.check import main;"
        "sys.argv = ['check', *sys.argv[1:]]; main()"
    )
    done = launch(1, "-c", program, path, tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "report.json")["warnings"] == []


def test_a_model_that_cannot_be_split_ends_the_program_before_it_starts_anything(
    edit, n3lo, tmp_path
):
    edit(STRATEGY, 'strategy = "tensor"')
    edit('"model.args.width" = { type = "int", low = 2, high = 8 }\n', "")
    path = edit(LAYOUT, f"{LAYOUT}\nranks_per_worker = 9")
    done = n3lo("run", path, "--set", "cores=9")
    assert done.returncode == 2
    assert done.stderr == (
        "n3lo: training.strategy: 'tensor' splits Linear and Embedding layers, and this model has "
        "none that 9 ranks can share; use 'pipeline' or 'sharded'\n"
    )
    assert not (tmp_path / "runs" / "small").exists()
