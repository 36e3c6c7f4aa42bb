"""The 3DGAN: its layers and losses are those of its papers, and it trains as its turns say."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.nn import functional

from apps.adversarial import Adversarial
from apps.check import check
from apps.contract import Fingerprint, N3LOError, Training
from apps.data import Batch
from apps.models.calorimeter_gan import CalorimeterGan, Discriminator, Generator, Scale, flip
from workflow.plan import Planner
from workflow.study import load

STUDIES = sorted((ROOT / "studies").glob("calorimeter_gan*.toml"))
SHOWERS = [ROOT / f"studies/data/clic_ecal_electrons_geant4_part{part}.h5" for part in (1, 2)]

SMALL = {
    "generator": {"latent_size": 4, "filters": [2, 2, 2]},
    "discriminator": {"filters": [2, 2, 2, 2], "kernel": 3},
}


def small(**settings: Any) -> CalorimeterGan:
    torch.manual_seed(3)
    return CalorimeterGan(**(SMALL | settings))


def showers_and_energies(events: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Random cells, 4 % of them hit; GeV."""
    generator = torch.Generator().manual_seed(5)
    cells = torch.rand(events, 25, 25, 25, generator=generator)
    hit = torch.rand(events, 25, 25, 25, generator=generator) < 0.04
    return 0.004 * cells * hit, torch.linspace(10, 100, events)


def batch_norms(network: nn.Module) -> list[nn.BatchNorm3d]:
    return [each for each in network.modules() if isinstance(each, nn.BatchNorm3d)]


# -- the networks ----------------------------------------------------------------------------------


def test_the_networks_have_as_many_weights_as_those_of_nnlo():
    networks = CalorimeterGan().networks
    sizes = {name: sum(each.numel() for each in net.parameters()) for name, net in networks.items()}
    # Of Keras, which counts running statistics too: 872,948 and 73,450.
    assert sizes == {"generator": 872_808, "discriminator": 73_402}
    statistics = {
        name: sum(norm.running_mean.numel() + norm.running_var.numel() for norm in batch_norms(net))
        for name, net in networks.items()
    }
    assert statistics == {"generator": 140, "discriminator": 48}


@pytest.mark.parametrize("kernel", [3, 5])
def test_the_networks_have_a_cell_for_each_cell_of_the_calorimeter(kernel):
    cells = Generator(latent_size=4, filters=(2, 3, 4))(torch.randn(2, 4))
    assert cells.shape == (2, 25, 25, 25)
    real, energies = Discriminator(filters=(2, 3, 4, 5), kernel=kernel)(cells)
    assert real.shape == energies.shape == (2,)


def test_even_kernels_are_padded_as_keras_does_with_same():
    layers = Generator(latent_size=4, filters=(2, 2, 2)).layers
    images = torch.randn(1, 8, 7, 7, 8)
    pad, convolve = layers[3:5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it needs a copy
        expected = functional.conv3d(images, convolve.weight, convolve.bias, padding="same")
    torch.testing.assert_close(convolve(pad(images)), expected)


def test_initial_weights_are_those_of_keras():
    torch.manual_seed(0)
    generator, discriminator = Generator(), Discriminator()
    dense, first, *_, last = [
        each for each in generator.layers if isinstance(each, nn.Linear | nn.Conv3d)
    ]
    assert dense.weight.std().item() == pytest.approx(math.sqrt(2 / (200 + 3136)), rel=0.01)
    bound = math.sqrt(6 / (8 * 6 * 6 * 8))  # he_uniform
    assert 0.99 * bound < first.weight.abs().max() <= bound
    assert last.bias is None
    second = discriminator.layers[4]
    bound = math.sqrt(6 / ((32 + 8) * 5**3))  # glorot_uniform
    assert 0.99 * bound < second.weight.abs().max() <= bound
    assert not second.bias.any()
    assert {norm.eps for norm in batch_norms(generator)} == {1e-3}


def test_the_discriminator_has_no_opinion_before_it_has_learned_one():
    real, energies = Discriminator(filters=(2, 2, 2, 2))(showers_and_energies(2)[0])
    assert not real.any()
    assert not energies.any()


# -- the losses ------------------------------------------------------------------------------------


class Says(nn.Module):
    """A network that gives the same whatever it sees, and calls to mind what it saw."""

    def __init__(self, answer: Any, **attributes: Any) -> None:
        super().__init__()
        self.answer = answer
        vars(self).update(attributes)

    def forward(self, seen: torch.Tensor) -> Any:
        self.seen = seen
        return self.answer


LOGITS, FOUND = np.array([0.5, -2.0]), np.array([0.3, 0.8])  # 100 GeV
ENERGIES = np.array([40.0, 90.0])  # GeV


def percent(found: np.ndarray, wanted: np.ndarray) -> float:
    return 100 * np.mean(np.abs(found - wanted) / wanted)


@pytest.mark.parametrize(("turn", "real", "made"), [(0, 1, False), (1, 0, True), (2, 1, True)])
def test_a_loss_is_the_weighted_sum_of_its_three_terms(turn, real, made):
    gan = small(loss_weights={"real": 3.0, "energy": 0.5, "deposit": 0.2}, scale={"power": 0.5})
    showers, generated = showers_and_energies(2)[0], 1.3 * showers_and_energies(2)[0]
    answers = [torch.tensor(each, dtype=torch.float32) for each in (LOGITS, FOUND)]
    says = {
        "discriminator": Says(answers).eval(),
        "generator": Says(generated.sqrt(), latent_size=4),
    }
    loss, metrics = gan.loss(turn, says, showers, torch.tensor(ENERGIES, dtype=torch.float32))

    deposits = (generated if made else showers).numpy().sum(axis=(1, 2, 3))
    wanted = ENERGIES * (0.01963 - 0.00096 * np.log(ENERGIES / 100)) if made else deposits
    probability = 1 / (1 + np.exp(-LOGITS))
    told = probability if real else 1 - probability
    terms = -np.log(told).mean(), percent(FOUND, ENERGIES / 100), percent(deposits, wanted)
    assert loss.item() == pytest.approx(np.dot([3.0, 0.5, 0.2], terms), rel=1e-5)
    if turn == 2:
        assert metrics["deposit_error"].item() == pytest.approx(terms[2], rel=1e-5)
    else:
        assert metrics["discriminator_accuracy"].item() == 0.5


def test_a_shower_without_a_deposit_gives_a_finite_loss():
    gan = small()
    nothing = torch.zeros(2, 25, 25, 25)
    for turn in range(len(gan.turns)):
        loss, _ = gan.loss(turn, gan.networks, nothing, torch.tensor([1e-6, 50.0]))
        assert loss.isfinite()


def test_labels_are_flipped_at_the_rate_asked_for():
    torch.manual_seed(1)
    told = torch.cat([flip(torch.ones(20_000), 0.05), 1 - flip(torch.zeros(20_000), 0.05)])
    sigma = math.sqrt(0.05 * 0.95 / 40_000)
    assert 1 - told.mean().item() == pytest.approx(0.05, abs=5 * sigma)


def test_the_discriminator_is_never_deceived_in_validation():
    gan = small(label_flip=0.49)
    gan.networks["discriminator"].eval()
    batch = showers_and_energies(16)
    first, second = (gan.loss(0, gan.networks, *batch)[0] for _ in range(2))
    assert first == second


def test_the_mean_deposit_is_that_of_the_geant4_showers():
    deposits, energies = [], []
    for path in SHOWERS:
        with h5py.File(path) as file:
            deposits.append(file["ECAL_E"][:])
            energies.append(file["energy"][:])
    energies = np.concatenate(energies)
    response = np.concatenate(deposits) / energies
    expected = small().mean_deposit(torch.from_numpy(energies)).numpy() / energies
    for low in range(10, 100, 10):
        inside = (energies >= low) & (energies < low + 10)
        assert expected[inside].mean() == pytest.approx(response[inside].mean(), rel=0.01)


def test_cells_come_back_from_the_networks_scale():
    scale = Scale(unit_gev=1e-3, power=0.5)
    cells = torch.tensor([0.0, 1e-6, 4e-3, 0.1])
    seen = scale.to_cells(cells)
    torch.testing.assert_close(seen, torch.tensor([0.0, math.sqrt(1e-3), 2.0, 10.0]))
    torch.testing.assert_close(scale.to_gev(seen), cells)


# -- the turns -------------------------------------------------------------------------------------


def test_only_the_network_that_moves_gathers_a_gradient():
    gan = small(generator_steps=1)
    experiment = Adversarial(gan, Training(loss="own"))
    inputs, targets = showers_and_energies()
    moved = []
    for update in experiment.updates(gan.networks, Batch(inputs, targets, 4, 4)):
        update.loss.backward()
        for name, network in gan.networks.items():
            gradients = [each.grad for each in network.parameters()]
            if name == update.network:
                assert all(each is not None and each.isfinite().all() for each in gradients)
                network.zero_grad()
            else:
                assert all(each is None for each in gradients)
        moved.append(update.network)
    assert moved == ["discriminator", "discriminator", "generator"]


def test_gradients_lie_in_memory_as_their_weights_do():
    """Else DDP warns, and copies them."""
    gan = CalorimeterGan(
        generator={"latent_size": 4, "filters": [4, 4, 4]}, discriminator={"kernel": 3}
    )
    for turn in (0, 2):
        gan.loss(turn, gan.networks, *showers_and_energies(2))[0].backward()
    weights = [each for network in gan.networks.values() for each in network.parameters()]
    assert [each.grad.stride() for each in weights] == [each.stride() for each in weights]


def test_a_network_gathers_statistics_in_its_own_turns_only():
    gan = small()
    batch = showers_and_energies()
    for turn, name in enumerate(gan.turns):
        before = {key: [n.running_mean.clone() for n in batch_norms(net)]
                  for key, net in gan.networks.items()}  # fmt: skip
        gan.loss(turn, gan.networks, *batch)
        for key, network in gan.networks.items():
            for norm, mean in zip(batch_norms(network), before[key], strict=True):
                assert torch.equal(norm.running_mean, mean) == (key != name)


def test_each_turn_of_a_step_draws_its_own_showers():
    gan = small()
    seen = []
    for turn in (1, 2, 3):
        generator = Says(torch.ones(4, 25, 25, 25), latent_size=4)
        gan.loss(turn, {**gan.networks, "generator": generator}, *showers_and_energies())
        seen.append(generator.seen)
    assert not any(torch.equal(a, b) for a, b in pairwise(seen))


def test_energy_scales_the_random_numbers_of_a_shower():
    gan = small()
    generator = Says(torch.ones(2, 25, 25, 25), latent_size=4)
    torch.manual_seed(7)
    gan.make(generator, torch.tensor([100.0, 25.0]))
    torch.manual_seed(7)
    torch.testing.assert_close(generator.seen, torch.randn(2, 4) * torch.tensor([[1.0], [0.25]]))


# -- showers ---------------------------------------------------------------------------------------


def test_showers_are_reproduced_by_the_seed_and_hold_no_negative_cell():
    gan = small(scale={"unit_gev": 1e-3, "power": 0.5})
    for network in gan.networks.values():
        network.eval()
    energies = torch.linspace(10, 100, 8)
    made = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        made.append(gan.generate(energies))
    assert made[0].shape == (8, 25, 25, 25)
    assert not made[0].requires_grad
    assert (made[0] >= 0).all()
    assert (made[0] > 0).any()
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_the_verdict_on_real_showers_is_zero(monkeypatch):
    gan = small()
    showers, energies = showers_and_energies(6)
    monkeypatch.setattr(gan, "generate", lambda energies: showers)
    verdict = gan.verdict(gan.judge(showers, energies))
    assert verdict == {"shower_error": 0, "moment_error": 0, "profile_error": 0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"label_flip": 0.7}, "model.args.label_flip: 0.7 is not from 0 to below 0.5"),
        ({"generator_steps": 0}, "model.args.generator_steps: 0 is not at least 1"),
        ({"loss_weights": {"sum": 1}}, "model.args.loss_weights: .*sum are not real, energy, dep"),
        ({"discriminator": {"kernel": 4}}, "model.args.discriminator.kernel: 4 is not 3, 5, ..."),
        ({"generator": {"filters": [2]}}, "generator.filters: .2. are not three numbers"),
        ({"scale": {"power": 2.0}}, "model.args.scale.power: 2.0 is not above 0 and at most 1"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(settings, said):
    with pytest.raises(N3LOError, match=said):
        small(**settings)


# -- the studies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_fits_its_model_and_data(path):
    file = load(path)
    planner = Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c"))
    report = check(planner.base_task())
    assert report["events"] == 2000
    assert not report["non_finite"] or not any(report["non_finite"].values())
