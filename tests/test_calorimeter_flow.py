"""Showers by flow matching: the transforms, the matching loss, the solver, and what they make."""

from __future__ import annotations

import math

import h5py
import numpy as np
import pytest
import torch
from conftest import ROOT

from apps.check import check
from apps.contract import Fingerprint, N3LOError, Training
from apps.data import Batch
from apps.models.calorimeter_flow import (
    EMPTY,
    HIT,
    LAYER_FLOOR_GEV,
    LAYER_RATIO_MEANS,
    LAYER_RATIO_SPREADS,
    THRESHOLD_GEV,
    CalorimeterFlow,
    Gaussian,
    decode_cells,
    decode_layers,
    encode_cells,
    encode_layers,
    matching_loss,
    midpoint,
    mixture_velocity,
    share_out,
    turned,
)
from workflow.plan import Planner
from workflow.study import load

SHOWERS = ROOT / "studies/data/clic_ecal_electrons_geant4_part1.h5"


@pytest.fixture(scope="module")
def real() -> tuple[torch.Tensor, torch.Tensor]:
    """50 showers of Geant4 (50, 25, 25, 25) and their energies (50,), in GeV."""
    with h5py.File(SHOWERS) as file:
        return torch.from_numpy(file["ECAL"][:50]), torch.from_numpy(file["energy"][:50])


@pytest.fixture
def small() -> CalorimeterFlow:
    torch.manual_seed(1)
    return CalorimeterFlow(layers_width=16, layers_depth=1, cells_width=8, num_steps=2)


def made(flow: CalorimeterFlow, seed: int, energies: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(seed)
    return flow.generate(energies)


# -- transforms


def test_layers_come_back_from_their_encoding(real):
    showers, energies = real
    layers = showers.sum(dim=(1, 2))
    layers[0, 20:] = 0  # a shower that ends early
    layers[1, :3] = 0  # and one that begins late
    back = decode_layers(encode_layers(layers, energies), energies)
    torch.testing.assert_close(back, layers, rtol=1e-3, atol=1e-7)


def test_layers_are_encoded_as_response_and_ratios_to_what_lies_behind():
    rng = np.random.default_rng(2)
    layers, energy = rng.gamma(2, 1e-2, size=25), 40.0
    ratios = [
        math.log((layers[k] + LAYER_FLOOR_GEV) / (layers[k + 1 :].sum() + LAYER_FLOOR_GEV))
        for k in range(24)
    ]
    expected = [
        (layers.sum() / energy - 0.0203) / 0.0014,
        *((np.array(ratios) - LAYER_RATIO_MEANS) / LAYER_RATIO_SPREADS),
    ]
    encoded = encode_layers(torch.tensor(layers)[None], torch.tensor([energy]))[0]
    np.testing.assert_allclose(encoded, expected, rtol=1e-4)


def test_whatever_the_field_gives_layers_are_energies_that_sum_to_the_response():
    encoded = 4 * torch.randn(500, 25, generator=torch.Generator().manual_seed(3))
    encoded[:, 0].clamp_(min=-10)
    energies = torch.full((500,), 50.0)
    layers = decode_layers(encoded, energies)
    assert (layers >= 0).all()
    response = encoded[:, 0] * 0.0014 + 0.0203
    torch.testing.assert_close(layers.sum(dim=1) / energies, response, rtol=1e-5, atol=1e-8)


def test_cells_come_back_from_their_encoding_and_empty_ones_stay_empty(real):
    showers, _ = real
    back = decode_cells(encode_cells(showers))
    torch.testing.assert_close(back, showers, rtol=2e-5, atol=0)


def test_encoded_cells_are_of_order_one_with_empty_ones_apart_from_the_others(real):
    showers, _ = real
    encoded = encode_cells(showers)
    assert encoded[showers > 0].min() > encoded[showers == 0].max() + 0.3  # half a decade / 1.5
    assert encoded.min() > -0.4
    assert encoded.max() < 4.1


def test_a_real_shower_turned_in_its_eight_ways_is_what_numpy_makes_of_it(real):
    shower = real[0][0]
    torch.manual_seed(4)
    found = {each.numpy().tobytes() for each in turned(shower.expand(200, -1, -1, -1))}
    plain, mirrored = shower.numpy(), shower.numpy()[::-1]
    ways = [np.rot90(each, k) for each in (plain, mirrored) for k in range(4)]
    assert found == {each.tobytes() for each in ways}


def test_cells_are_scaled_to_the_energy_of_their_layer():
    random = torch.Generator().manual_seed(5)
    cells = 0.1 + torch.rand(3, 25, 25, 25, generator=random)
    layers = 0.1 + torch.rand(3, 25, generator=random)
    shared = share_out(cells, layers)
    expected = cells.numpy() * (layers.numpy() / cells.numpy().sum((1, 2)))[:, None, None]
    np.testing.assert_allclose(shared, expected, rtol=1e-4)


def test_a_layer_without_a_hit_gives_its_energy_to_its_middle_cell():
    shared = share_out(torch.zeros(1, 25, 25, 25), torch.full((1, 25), 2e-3))
    assert shared.count_nonzero() == 25
    assert (shared[0, 12, 12] == 2e-3).all()


def test_cells_that_are_scaled_below_the_threshold_leave_their_energy_to_the_others():
    cells = torch.zeros(1, 25, 25, 25)
    cells[0, 12, 12] = 1.0
    cells[0, 3, 4] = 1e-4  # 1e-7 GeV of a layer of 1e-3 GeV
    shared = share_out(cells, torch.full((1, 25), 1e-3))
    assert shared[0, 3, 4].eq(0).all()
    torch.testing.assert_close(shared[0, 12, 12], torch.full((25,), 1e-3))


# -- flow matching


class Recorder(torch.nn.Module):
    """A field that keeps where it was asked, and gives 0."""

    def forward(self, place, time, condition):
        self.place, self.time = place, time
        return torch.zeros_like(place)


def test_the_loss_is_the_squared_distance_to_data_minus_noise_on_the_straight_way():
    data, field = torch.randn(6, 4), Recorder()
    torch.manual_seed(7)
    loss = matching_loss(field, data, torch.zeros(6, 1))
    torch.manual_seed(7)
    noise, time = torch.randn(6, 4).numpy(), torch.rand(6).numpy()
    way = (1 - time)[:, None] * noise + time[:, None] * data.numpy()
    np.testing.assert_allclose(field.place, way, rtol=1e-5, atol=1e-6)
    assert loss.item() == pytest.approx(np.mean((data.numpy() - noise) ** 2), rel=1e-5)


def towards(event: torch.Tensor):
    """The field of a data set of one event: x1 - x0 = (x1 - x_t) / (1 - t)."""
    return lambda place, time: (event - place) / (1 - time)[:, None]


def test_the_field_that_points_at_the_only_event_has_no_loss_and_arrives_there():
    event = torch.tensor([1.0, -2.0, 0.5])
    field = towards(event)
    loss = matching_loss(lambda x, t, _: field(x, t), event.expand(100, 3), torch.zeros(100, 1))
    assert loss.item() == pytest.approx(0, abs=1e-6)
    arrived = midpoint(field, torch.randn(100, 3), num_steps=5)
    torch.testing.assert_close(arrived, event.expand(100, 3), rtol=1e-4, atol=1e-4)


def test_the_solver_follows_exponential_growth_with_an_error_of_second_order():
    start = torch.ones(1, 1, dtype=torch.float64)
    errors = [abs(midpoint(lambda x, t: x, start, num).item() - math.e) for num in (8, 16, 32)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (2.4, 0.7), (0.0, 0.2)])
def test_the_field_of_a_gaussian_carries_each_place_on_its_analytic_way(mean, spread):
    """x(t) = t m + x0 sqrt(t^2 s^2 + (1 - t)^2): the spread of x_t, which keeps its order."""
    start, target = torch.tensor([[-1.5], [0.2], [1.0]]), Gaussian(mean, spread)
    there = midpoint(lambda x, t: target.velocity(x, t[:, None]), start, num_steps=100)
    torch.testing.assert_close(there, mean + spread * start, rtol=0, atol=3e-3)


def expected_velocity(place: float, time: float, probability: float, hit: Gaussian) -> float:
    """E[x1 - x0 | x_t] = (E[x1 | x_t] - x_t) / (1 - t), by a sum over all x1."""
    x1 = np.linspace(-3, 8, 200_001)

    def density(of: Gaussian) -> np.ndarray:
        return np.exp(-(((x1 - of.mean) / of.spread) ** 2) / 2) / of.spread

    prior = probability * density(hit) + (1 - probability) * density(EMPTY)
    posterior = prior * np.exp(-(((place - time * x1) / (1 - time)) ** 2) / 2)
    return ((posterior @ x1) / posterior.sum() - place) / (1 - time)


@pytest.mark.parametrize("place", [-1.0, 0.1, 1.2, 2.5])
@pytest.mark.parametrize("time", [0.0, 0.4, 0.9])
def test_the_field_of_a_cell_is_the_mean_velocity_of_all_ways_through_its_place(place, time):
    logit, hit = torch.tensor([[0.5]]), Gaussian(torch.tensor([[2.0]]), torch.tensor([[0.6]]))
    found = mixture_velocity(torch.tensor([[place]]), torch.tensor([time]), logit, hit)
    expected = expected_velocity(place, time, 1 / (1 + math.exp(-0.5)), Gaussian(2.0, 0.6))
    assert found.item() == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_the_field_of_a_cell_makes_hits_as_often_as_it_says(probability):
    shape = (20_000, 1)
    logit = torch.full(shape, math.log(probability / (1 - probability)))
    hit = Gaussian(torch.full(shape, 2.4), torch.full(shape, 0.7))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(10))
    made = midpoint(lambda x, t: mixture_velocity(x, t, logit, hit), noise, num_steps=20)
    error = math.sqrt(probability * (1 - probability) / 20_000)
    assert (made > 0.8).float().mean().item() == pytest.approx(probability, abs=4 * error + 0.01)


def test_networks_begin_at_the_fields_of_independent_numbers(small):
    """Of N(0, 1) for layers, and of cells that are empty or hit, anywhere alike."""
    time = torch.tensor([0.2, 0.9])
    layers, cells = torch.randn(2, 25), torch.randn(2, 25, 25, 25)
    velocity = small.networks["layers"](layers, time, torch.randn(2, 1))
    torch.testing.assert_close(velocity, Gaussian(0.0, 1.0).velocity(layers, time[:, None]))
    velocity = small.networks["cells"](cells, time, torch.randn(2, 26))
    logit, mean, log_spread = (torch.full_like(cells, each) for each in HIT)
    hit = Gaussian(mean, log_spread.exp())
    torch.testing.assert_close(velocity, mixture_velocity(cells, time, logit, hit))


# -- training and showers


def adversarial(flow: CalorimeterFlow, lr: float = 1e-3):
    return flow.experiment(Training(loss="own", optimizer={"name": "adam", "lr": lr}))


def batch_of(real: tuple[torch.Tensor, torch.Tensor], num: int) -> Batch:
    showers, energies = real
    return Batch(showers[:num], energies[:num], num, num)


def train(flow: CalorimeterFlow, batch: Batch, num_steps: int) -> list[dict[str, float]]:
    """The losses of each step, by name."""
    experiment = adversarial(flow, lr=1e-2)
    optimizers = experiment.optimizers()
    history = []
    for _ in range(num_steps):
        sums = experiment.no_sums()
        for update in experiment.updates(flow.networks, batch):
            optimizers[update.network].zero_grad()
            update.loss.backward()
            optimizers[update.network].step()
            sums += update.sums
        history.append(experiment.means(sums))
    return history


def test_both_losses_fall_on_a_few_showers(real):
    torch.manual_seed(1)
    flow = CalorimeterFlow(32, 1, cells_width=8, draws=4, layers_updates=5)
    history = train(flow, batch_of(real, 4), num_steps=30)
    for name in ("layers_loss", "cells_loss"):
        first, last = (np.mean([row[name] for row in rows]) for rows in (history[:5], history[-5:]))
        assert last < 0.8 * first


def test_each_network_moves_in_its_own_turns_only(real):
    flow = CalorimeterFlow(layers_width=16, cells_width=8, layers_updates=3)
    moves = []
    for update in adversarial(flow).updates(flow.networks, batch_of(real, 2)):
        update.loss.backward()
        for name, network in flow.networks.items():
            touched = any(each.grad is not None for each in network.parameters())
            assert touched == (name == update.network)
            network.zero_grad()
        moves.append(update.network)
    assert moves == ["layers", "layers", "layers", "cells"]


def test_draws_are_events_of_their_own(real):
    """Twice the events by two draws: the random numbers are the same, and so is the loss."""
    showers, energies = real[0][:2], real[1][:2]
    losses = []
    for draws, repeats in ((2, 1), (1, 2)):
        torch.manual_seed(8)
        flow = CalorimeterFlow(layers_width=16, cells_width=8, draws=draws)
        torch.manual_seed(9)
        inputs = showers.repeat_interleave(repeats, dim=0)
        loss, _ = flow.loss(1, flow.networks, inputs, energies.repeat_interleave(repeats))
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_made_cells_are_energies_above_the_threshold_that_sum_to_the_layers(small):
    energies = torch.linspace(10, 100, 6)
    train(small, Batch(torch.rand(2, 25, 25, 25) * 1e-3, energies[:2], 2, 2), num_steps=3)
    showers = made(small, 3, energies)
    assert showers.shape == (6, 25, 25, 25)
    assert ((showers == 0) | (showers > THRESHOLD_GEV)).all()
    torch.manual_seed(3)
    with torch.no_grad():
        layers = small.generate_layers(energies)
    torch.testing.assert_close(showers.sum(dim=(1, 2)), layers, rtol=1e-4, atol=2e-6)


def test_a_seed_repeats_its_showers_and_another_makes_others(small):
    energies = torch.tensor([20.0, 80.0])
    assert torch.equal(made(small, 5, energies), made(small, 5, energies))
    assert not torch.equal(made(small, 5, energies), made(small, 6, energies))


def test_validation_judges_the_made_showers_against_the_real_ones(small, real):
    experiment = adversarial(small)
    with torch.no_grad():
        found = experiment.val_means(experiment.evaluate(batch_of(real, 10)))
    assert {f"val_{name}" for name in found} <= set(experiment.measured)
    assert found["shower_error"] == pytest.approx(found["moment_error"] + found["profile_error"])
    assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize(
    ("showers", "energies"), [((2, 51, 51, 25), (2,)), ((2, 25, 25, 25), (2, 1))]
)
def test_events_of_another_shape_are_refused_in_one_line(small, showers, energies):
    with pytest.raises(N3LOError, match=r"\(B, 25, 25, 25\) and energies \(B,\)"):
        small.loss(0, small.networks, torch.ones(showers), torch.ones(energies))


@pytest.mark.parametrize(
    ("name", "value"), [("cells_width", 12), ("draws", 0), ("num_steps", 0), ("layers_updates", 0)]
)
def test_settings_that_cannot_be_are_refused_with_their_value(name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        CalorimeterFlow(**{name: value})


@pytest.mark.parametrize("name", ["calorimeter_flow", "calorimeter_flow_cpu"])
def test_a_study_fits_its_model_and_data(name):
    file = load(ROOT / f"studies/{name}.toml")
    planner = Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c"))
    assert check(planner.base_task())["warnings"] == []
