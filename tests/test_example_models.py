"""The models of sequences, graphs, events and showers that the examples train."""

from __future__ import annotations

from itertools import pairwise, product

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from training_helpers import JETS, ROOT

from apps.contract import Model
from apps.experiment import build_model
from apps.models.events import EventMlp
from apps.models.jedi import JediNet
from apps.models.jets import constituents
from apps.models.sequence import ParticleRnn

EXAMPLES = ROOT / "studies" / "examples"


@pytest.fixture(scope="module")
def jets() -> torch.Tensor:
    """The constituents of 12 simulated jets, (12, 100, 16)."""
    with h5py.File(JETS, "r") as file:
        return torch.from_numpy(file["jetConstituentList"][:12])


@pytest.fixture
def particles() -> torch.Tensor:
    """Made up, with 3 to 6 of 6 places filled: (4, 6, 5)."""
    values = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(2))
    return values * (torch.arange(6) < torch.tensor([[3], [6], [4], [5]])).unsqueeze(-1)


def shuffled(values: torch.Tensor) -> torch.Tensor:
    """The places of each event in another order."""
    order = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(0))
    return values[:, order]


def filled_up(values: torch.Tensor, places: int) -> torch.Tensor:
    return torch.cat([values, torch.zeros(len(values), places, values.shape[2])], dim=1)


# -- JEDI-net --------------------------------------------------------------------------------------


def test_jedi_net_has_as_many_parameters_as_in_nnlo():
    """f_R 32-50-25-14, f_O 30-50-25-10, f_C 10-50-25-5."""
    assert sum(each.numel() for each in JediNet().parameters()) == 8329


@pytest.mark.parametrize("masked", [False, True])
def test_jedi_net_equals_its_formula_with_dense_matrices(particles, masked):
    """arXiv:1908.05318: B = [I R_r; I R_s], E = f_R(B) R_r^T, O = f_O[I; E], f_C of their sum."""
    model = JediNet(num_features=5, hidden=8, effects=3, outputs=4, masked=masked)
    for event in particles:
        there = event[event.abs().sum(dim=1) > 0] if masked else event
        num = len(there)
        edges = [pair for pair in product(range(num), repeat=2) if pair[0] != pair[1]]
        receivers = one_hot(torch.tensor([pair[0] for pair in edges]), num).T.float()  # (N, N_R)
        senders = one_hot(torch.tensor([pair[1] for pair in edges]), num).T.float()
        pairs = torch.cat([there.T @ receivers, there.T @ senders])  # (2P, N_R)
        effects = model.f_r(pairs.T).T @ receivers.T  # (D_E, N)
        outputs = model.f_o(torch.cat([there.T, effects]).T)  # (N, D_O)
        expected = model.head(model.f_c(outputs.sum(dim=0)))
        torch.testing.assert_close(model(event[None])[0], expected)


@pytest.mark.parametrize("masked", [False, True])
def test_the_order_of_particles_does_not_change_what_jedi_net_gives(particles, masked):
    model = JediNet(num_features=5, masked=masked)
    torch.testing.assert_close(model(shuffled(particles)), model(particles))


def test_empty_places_do_not_change_what_a_masked_jedi_net_gives(particles):
    model = JediNet(num_features=5, masked=True)
    torch.testing.assert_close(model(filled_up(particles, 3)), model(particles))
    as_published = JediNet(num_features=5)
    assert not torch.allclose(as_published(filled_up(particles, 3)), as_published(particles))


def test_jedi_net_takes_the_leading_particles(particles):
    model = JediNet(num_features=5, num_particles=4)
    torch.testing.assert_close(model(particles), model(particles[:, :4]))


# -- sequences -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("pool", ["mean", "last"])
def test_a_recurrent_network_ignores_what_is_filled_up(jets, cell, pool):
    model = ParticleRnn(cell=cell, hidden=8, pool=pool, num_layers=2)
    shorter = jets[:, :40].clone()
    shorter[::2, 20:] = 0
    torch.testing.assert_close(model(filled_up(shorter, 30)), model(shorter))
    torch.testing.assert_close(model(shorter)[::2], model(shorter[::2, :20]))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("pool", ["mean", "last"])
def test_a_recurrent_network_gives_what_packed_sequences_give(jets, cell, pool):
    model = ParticleRnn(cell=cell, hidden=8, pool=pool)
    parts = constituents(jets)
    lengths = parts.mask.sum(dim=1).long()
    packed = pack_padded_sequence(parts.features, lengths, batch_first=True, enforce_sorted=False)
    states, _ = pad_packed_sequence(model.rnn(packed)[0], batch_first=True)
    last = states[torch.arange(12), lengths - 1]
    seen = states.sum(dim=1) / lengths.unsqueeze(1) if pool == "mean" else last
    torch.testing.assert_close(model(jets), model.head(model.dense(seen)))


def test_the_order_of_a_sequence_matters(jets):
    model = ParticleRnn(hidden=8)
    assert not torch.allclose(model(jets[:, :20]), model(jets[:, :20].flip(1)))


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_a_sequence_without_constituents_gives_finite_logits_and_gradients(pool):
    model = ParticleRnn(hidden=4, pool=pool)
    logits = model(torch.zeros(2, 10, 16))
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters())


@pytest.mark.parametrize(("args", "message"), [
    ({"cell": "rnn"}, "there is no cell 'rnn', only lstm, gru"),
    ({"pool": "max"}, "there is no pool 'max', only mean, last"),
])  # fmt: skip
def test_an_unknown_cell_or_pool_lists_those_that_there_are(args, message):
    with pytest.raises(ValueError, match=message):
        ParticleRnn(**args)


# -- tables of events ------------------------------------------------------------------------------


def test_an_event_network_gives_one_logit_an_event():
    """Baldi et al.: five layers of 300 on 28 quantities."""
    model = EventMlp(num_features=28, batch_norm=False)
    assert model(torch.randn(3, 28)).shape == (3,)
    sizes = [28, 300, 300, 300, 300, 300, 1]
    wanted = sum(num_in * num_out + num_out for num_in, num_out in pairwise(sizes))
    assert sum(each.numel() for each in model.parameters()) == wanted


def test_units_do_not_matter_to_an_event_network_with_batch_norm():
    model = EventMlp(num_features=4, width=8, depth=1)
    events = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) * 10
    in_mev = events * torch.tensor([1000.0, 1.0, 1.0, 1000.0])
    torch.testing.assert_close(model(in_mev), model(events), rtol=1e-3, atol=1e-3)


def test_an_event_network_without_hidden_layers_is_a_linear_one():
    model = EventMlp(num_features=4, depth=0, batch_norm=False, dropout=0.5)
    assert [type(each) for each in model.layers] == [nn.Linear]


# -- those that lie beside their studies -----------------------------------------------------------


def test_a_shower_regression_begins_with_the_sampling_fraction_and_the_middle():
    model = build_model(Model(source=f"{EXAMPLES / 'shower_regression.py'}:ShowerRegression"))
    nn.init.zeros_(model.layers[-1].weight)
    nn.init.zeros_(model.layers[-1].bias)
    cells = torch.zeros(2, 25, 25, 25)
    cells[0, 12, 12, 3] = 1.0
    cells[1, 13, 12, 5] = cells[1, 12, 10, 5] = 0.5
    found = model(cells, torch.tensor([1.0, 1.0]))
    np.testing.assert_allclose(found["energy"].detach(), [50, 50], rtol=1e-5)
    np.testing.assert_allclose(found["impact"].detach(), [[0, 0], [2.55, -5.1]], atol=1e-4)


@pytest.fixture(scope="module")
def particle_net():
    pytest.importorskip("torch_geometric")
    return build_model(Model(source=f"{EXAMPLES / 'particle_net.py'}:ParticleNet"))


def graphs(jets: torch.Tensor) -> dict[str, torch.Tensor]:
    from n3lo_model_particle_net import graphs as made

    return made(jets)


def test_each_constituent_has_edges_from_its_nearest_ones(particle_net, jets):
    graph = graphs(jets)
    here = jets[0, jets[0, :, 5] > 0]
    places = here[:, [8, 11]].double()
    apart = torch.cdist(places, places).fill_diagonal_(torch.inf)
    start, end = graph["edge_index"]
    assert int((graph["batch"] == 0).sum()) == len(here)
    for number in (0, 7, len(here) - 1):
        found = apart[number, start[end == number]].sort().values
        torch.testing.assert_close(found, apart[number].sort().values[:8], rtol=1e-4, atol=1e-6)


def test_graphs_are_those_of_the_constituents_that_are_there(particle_net, jets):
    logits = particle_net(**graphs(jets))
    assert logits.shape == (12, 5)
    torch.testing.assert_close(particle_net(**graphs(filled_up(jets, 20))), logits)
    torch.testing.assert_close(particle_net(**graphs(jets[3:5])), logits[3:5])


def test_the_order_of_constituents_does_not_change_a_graph(particle_net, jets):
    expected = particle_net(**graphs(jets))
    found = particle_net(**graphs(shuffled(jets)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_jet_with_few_constituents_is_a_graph_too(particle_net):
    jets = torch.zeros(3, 10, 16)
    jets[1, 0, :] = 1.0
    graph = graphs(jets)
    assert graph["batch"].tolist() == [0, 1, 2]
    assert graph["edge_index"].shape == (2, 0)
    assert torch.isfinite(particle_net(**graph)).all()
