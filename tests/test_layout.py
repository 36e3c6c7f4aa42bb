"""Which rank is what, how many there are, and which batches fall to whom."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from apps.contract import Exchange, Layout, N3LOError, Training, ranks_of
from apps.rules import check_ranks
from apps.strategies.dealer import Dealer, Turn, first_turns
from apps.strategies.flat import pieces_of
from apps.topology import places_of
from sites.launchers import Shape, mpirun
from workflow.plan import largest_shape
from workflow.study import load


def training(strategy: str = "downpour", optimizer: dict | None = None, **exchange) -> Training:
    return Training(
        strategy=strategy,
        optimizer=optimizer or {"name": "sgd", "lr": 0.1},
        exchange=Exchange(**exchange),
    )


# -- ranks -----------------------------------------------------------------------------------------

EQUATIONS = [
    (training("local"), Layout(), "1 worker x 1 rank = 1 rank"),
    (
        training("allreduce"),
        Layout(num_workers=2, ranks_per_worker=3),
        "2 workers x 3 ranks = 6 ranks",
    ),
    (training(), Layout(num_workers=3), "1 master + 3 workers x 1 rank = 4 ranks"),
    (training(), Layout(num_workers=3, num_masters=2), "2 masters + 3 workers x 1 rank = 5 ranks"),
    (
        training("gem"),
        Layout(num_workers=2, sub_masters=[2]),
        "3 masters + 4 workers x 1 rank = 7 ranks",
    ),
    (
        training("easgd"),
        Layout(num_workers=2, sub_masters=[2, 3], ranks_per_worker=4),
        "9 masters + 12 workers x 4 ranks = 57 ranks",
    ),
    (training(transport="window"), Layout(num_workers=3), "3 workers x 1 rank = 3 ranks"),
    (
        training(transport="one_sided"),
        Layout(num_workers=3),
        "1 master + 3 workers x 1 rank = 4 ranks",
    ),
]


@pytest.mark.parametrize(
    ("training", "layout", "equation"), EQUATIONS, ids=[e for *_, e in EQUATIONS]
)
def test_the_ranks_of_a_layout_are_an_equation(training, layout, equation):
    ranks = ranks_of(training, layout)
    assert str(ranks) == equation
    assert len(places_of(layout, ranks)) == ranks.total


def test_workers_know_their_master_and_masters_their_workers():
    layout = Layout(num_workers=2, ranks_per_worker=2)
    master, *workers = places_of(layout, ranks_of(training(), layout))
    assert master.children == (1, 3)
    assert not master.trains
    assert [place.parents for place in workers] == [(0,)] * 4
    assert [place.group for place in workers] == [(1, 2), (1, 2), (3, 4), (3, 4)]
    assert [place.worker for place in workers] == [0, 0, 1, 1]


def test_masters_of_parts_all_have_all_the_workers():
    layout = Layout(num_workers=3, num_masters=2)
    places = places_of(layout, ranks_of(training(), layout))
    assert [place.children for place in places[:2]] == [(2, 3, 4)] * 2
    assert [place.parents for place in places] == [(), (), (0, 1), (0, 1), (0, 1)]


def test_a_tree_of_masters_may_be_of_any_depth():
    layout = Layout(num_workers=1, sub_masters=[2, 2])
    places = places_of(layout, ranks_of(training(), layout))
    assert [place.children for place in places[:7]] == [
        (1, 2), (3, 4), (5, 6), (7,), (8,), (9,), (10,)
    ]  # fmt: skip
    assert [place.parents for place in places] == [
        (), (0,), (0,), (1,), (1,), (2,), (2,), (3,), (4,), (5,), (6,)
    ]  # fmt: skip


def test_masters_take_no_gpu_and_a_job_may_outlive_a_rank():
    shape = Shape(num_ranks=5, num_masters=1, gpus_per_rank=2, outlives_ranks=True)
    assert shape.num_gpus == 8
    assert mpirun(shape)[-2:] == ["--with-ft", "ulfm"]


# -- what does not go together ---------------------------------------------------------------------

ADAM = {"name": "adam", "lr": 0.1}
WRONG = [
    (training("gem", ADAM), Layout(), "training.optimizer: gem matches the energy of sgd"),
    (
        training("easgd", {"name": "muon"}),
        Layout(),
        "training.optimizer: 'muon' needs whole layers",
    ),
    (
        training("easgd", {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        Layout(),
        "training.optimizer: the momentum variant of easgd",
    ),
    (
        training(optimizer=ADAM, transport="one_sided"),
        Layout(),
        "training.exchange.transport: 'one_sided' MPI",
    ),
    (
        training(transport="window"),
        Layout(num_masters=2),
        "training.exchange.transport: 'window' needs one whole",
    ),
    (
        training(transport="window"),
        Layout(sub_masters=[2]),
        "training.exchange.transport: 'window' needs one whole",
    ),
    (
        training(tolerate_worker_loss=True),
        Layout(ranks_per_worker=2),
        "training.exchange.tolerate_worker_loss: needs",
    ),
    (
        training(synchronous=True, backup_workers=1),
        Layout(num_workers=3, num_masters=2),
        "training.exchange.backup_workers: several masters",
    ),
    (
        training(synchronous=True, backup_workers=3),
        Layout(num_workers=3),
        "training.exchange.backup_workers: 3 is not below layout.num_workers = 3",
    ),
    (
        training("easgd", synchronous=True, backup_workers=1),
        Layout(num_workers=3),
        "training.exchange.backup_workers: easgd does not use it",
    ),
    (
        training(pass_on_every=2),
        Layout(),
        "training.exchange.pass_on_every: only asynchronous sub-masters",
    ),
    (training(gpu_aware=True), Layout(), "training.exchange.gpu_aware: there is no GPU"),
    (
        training("gem", synchronous=True),
        Layout(),
        "training.exchange.synchronous: gem does not use it",
    ),
    (training("gem", overlap=True), Layout(), "training.exchange.overlap: gem does not use it"),
    (training("gem", sync_every=2), Layout(), "training.exchange.sync_every: gem does not use it"),
    (
        training("easgd", staleness_lr=True),
        Layout(),
        "training.exchange.staleness_lr: easgd does not use it",
    ),
]


@pytest.mark.parametrize(("training", "layout", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_what_does_not_go_together_is_said_with_its_key(training, layout, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        check_ranks(training, layout)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sync_every": 0}, "sync_every: 0 is not at least 1"),
        ({"backup_workers": -1}, "backup_workers: -1 is not at least 0"),
        ({"backup_workers": 1}, "backup_workers: asynchronous masters wait for nobody"),
        ({"elastic_force": 1.1}, "elastic_force: 1.1 is not above 0 and at most 1"),
        ({"kappa": 0.0}, "kappa: 0.0 is not above 0"),
        ({"pass_on_every": 0}, "pass_on_every: 0 is not at least 1"),
        ({"transport": "window", "synchronous": True}, "synchronous: needs transport = 'messages'"),
        ({"synchronous": True, "overlap": True}, "overlap: needs synchronous = false"),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Exchange(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_masters": 0}, "num_masters: 0 is not at least 1"),
        ({"sub_masters": [0]}, "sub_masters: 0 is not at least 1"),
        ({"num_masters": 2, "sub_masters": [2]}, "sub_masters: the top master's weights are whole"),
    ],
)
def test_a_layout_of_masters_that_cannot_be_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Layout(**settings)


SEARCHED = """
"training.strategy" = { type = "choice", values = ["local", "downpour", "gem"] }
"training.exchange.sync_every" = { type = "choice", values = [1, 4]%s }
"""


def test_choices_that_do_not_go_together_are_refused_before_anything_runs(edit):
    old = '"model.args.width" ='
    path = edit(old, SEARCHED.replace("%s", "").strip() + "\n" + old)
    with pytest.raises(N3LOError, match=r"'training.strategy' = 'gem'.* do not go together"):
        load(path)


def test_a_slot_holds_the_largest_of_the_strategies_that_are_searched(edit):
    old = '"model.args.width" ='
    condition = ', when = { "training.strategy" = ["downpour"] }'
    path = edit(old, SEARCHED.replace("%s", condition).strip() + "\n" + old)
    file = load(path)
    assert largest_shape(file).num_ranks == 2  # a master and a worker
    assert largest_shape(file).num_masters == 1


# -- who trains on what ----------------------------------------------------------------------------


def steps(turn: Turn) -> list[tuple[int, int]]:
    return [(turn.owner, step) for step in range(turn.first, turn.first + turn.count)]


@pytest.mark.parametrize("seed", range(20))
def test_every_step_is_dealt_once_however_fast_the_workers_are(seed):
    rng = random.Random(seed)
    num_workers, num_steps = rng.randint(1, 5), rng.randint(1, 20)
    size, ahead = rng.randint(1, 5), rng.randint(1, 2)
    dealer = Dealer(tuple(range(num_workers)), num_steps, size, ahead)
    held = {each: first_turns(each, num_steps, size, ahead) for each in range(num_workers)}
    speeds = [0.05 + rng.random() ** 3 for _ in held]
    done = []
    while any(held.values()):
        [worker] = rng.choices(range(num_workers), speeds)
        if held[worker]:
            done += steps(held[worker].pop(0))
            turn = dealer.deal(worker)
            assert turn.count <= size
            held[worker] += [turn] if turn.count else []
    assert Counter(done) == Counter(
        (worker, step) for worker in range(num_workers) for step in range(num_steps)
    )


@pytest.mark.parametrize("absent", [False, True])
def test_what_a_dead_worker_had_to_do_is_done_by_the_others(absent):
    dealer = Dealer((0, 1, 2), 6, 2, absent=[2] if absent else [])
    if not absent:
        dealer.lose(2)
    held = {worker: first_turns(worker, 6, 2, 1) for worker in (0, 1)}
    done = []
    while any(held.values()):
        for worker, turns in held.items():
            if turns:
                done += steps(turns.pop())
                turn = dealer.deal(worker)
                turns += [turn] if turn.count else []
    assert sorted(done) == [(worker, step) for worker in range(3) for step in range(6)]


def test_a_worker_does_its_own_steps_in_order_before_those_of_others():
    dealer = Dealer((0, 1), 4, 1)
    turns = [dealer.deal(0) for _ in range(7)]
    assert turns[:3] == [Turn(0, 1, 1), Turn(0, 2, 1), Turn(0, 3, 1)]
    assert turns[3:6] == [Turn(1, 3, 1), Turn(1, 2, 1), Turn(1, 1, 1)]
    assert turns[6].count == 0


@pytest.mark.parametrize(
    ("length", "masters", "size"), [(10, 1, 3), (10, 3, 2), (2, 3, 5), (7, 2, 7)]
)
def test_pieces_cover_a_network_and_masters_own_equal_shares(length, masters, size):
    pieces = pieces_of(slice(5, 5 + length), masters, size)
    assert [piece.number for piece in pieces] == list(range(len(pieces)))
    covered = [at for piece in pieces for at in range(piece.where.start, piece.where.stop)]
    assert covered == list(range(5, 5 + length))
    owned = Counter()
    for piece in pieces:
        assert 0 < piece.where.stop - piece.where.start <= size
        owned[piece.master] += piece.where.stop - piece.where.start
    shares = [owned[master] for master in range(masters)]
    assert max(shares) - min(shares) <= 1
