"""The models that come with N3LO, and the losses and metrics that judge them."""

from __future__ import annotations

from itertools import product

import h5py
import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot
from training_helpers import JETS, make_task

from apps.contract import Training
from apps.data import Batch, FoldBatches, Share, prepare
from apps.experiment import Supervised
from apps.models.jets import DeepSets, InteractionNetwork, JetMlp, constituents, jet_features
from apps.models.layers import ACTIVATIONS, activation
from apps.models.mnist import ConvNet

JET_MODELS = [
    DeepSets(width=8),
    InteractionNetwork(hidden=8, num_constituents=None),
    JetMlp(width_1=8),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def jets() -> torch.Tensor:
    """The constituents of 12 simulated jets, (12, 100, 16)."""
    with h5py.File(JETS, "r") as file:
        return torch.from_numpy(file["jetConstituentList"][:12])


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", JET_MODELS, ids=lambda model: type(model).__name__)
def test_a_jet_is_a_set_whose_order_does_not_matter(model, jets):
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(jets[:, order]), model(jets), rtol=1e-4, atol=1e-5)


def test_empty_places_do_not_change_a_jet(jets):
    shorter, model = jets[:, :50].clone(), DeepSets(width=8)
    padded = torch.cat([shorter, torch.zeros(12, 50, 16)], dim=1)
    torch.testing.assert_close(model(padded), model(shorter), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", JET_MODELS, ids=lambda model: type(model).__name__)
def test_a_jet_without_constituents_gives_finite_logits_and_gradients(model):
    logits = model(torch.zeros(2, 100, 16))
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters())


def test_features_are_of_order_one(jets):
    features = constituents(jets).features[jets[..., 5] > 0]
    for values in (features, jet_features(jets)):
        assert (values.mean(dim=0).abs() < 4).all()
        assert (values.std(dim=0) < 4).all()


def test_jet_features_know_mass_and_multiplicity(jets):
    """Against the four-vectors, in double precision."""
    px, py, pz, energy = jets[..., :4].double().sum(dim=1).unbind(-1)
    mass_over_pt = (energy**2 - px**2 - py**2 - pz**2).sqrt() / (px**2 + py**2).sqrt()
    found = jet_features(jets)
    torch.testing.assert_close(found[:, 0].double() / 10, mass_over_pt, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(found[:, 1] * 50, (jets[..., 5] > 0).sum(dim=1).float())


def test_the_interaction_network_equals_its_paper_with_dense_matrices(jets):
    """arXiv:1908.05318: B = I [R_r; R_s], effects summed by R_r^T, O = f_O [I; E]."""
    num = 6
    model = InteractionNetwork(hidden=8, num_constituents=num)
    features = constituents(jets[:, :num]).features.transpose(1, 2)  # (B, P, N)
    edges = [pair for pair in product(range(num), repeat=2) if pair[0] != pair[1]]
    receivers = one_hot(torch.tensor([pair[0] for pair in edges]), num).T.float()  # (N, edges)
    senders = one_hot(torch.tensor([pair[1] for pair in edges]), num).T.float()
    pairs = torch.cat([features @ receivers, features @ senders], dim=1)  # (B, 2P, edges)
    effects = model.f_r(pairs.transpose(1, 2)).transpose(1, 2) @ receivers.T / num
    outputs = model.f_o(torch.cat([features, effects], dim=1).transpose(1, 2))
    expected = model.head(model.f_c(outputs.sum(dim=1) / num))
    torch.testing.assert_close(model(jets), expected)


def test_deep_sets_learn_to_tell_jets_apart():
    """Chance is 0.2; the tutorial's study reaches more with more epochs."""
    task = make_task(
        [JETS],
        data={"inputs": "jetConstituentList", "targets": "jets[:, -6:-1]"},
        training={"batch_size": 32, "metrics": ["accuracy"]},
    )
    index, fold_of_event = prepare(task.data, 5)
    data = FoldBatches(task, index, fold_of_event, Share(rank=0, num_ranks=1, group_size=1), CPU)
    torch.manual_seed(1)
    experiment = Supervised(DeepSets(width=32), task.training)
    optimizer = torch.optim.Adam(experiment.networks["model"].parameters(), lr=4e-3)
    for epoch in range(1, 9):
        for batch in data.training(epoch):
            for update in experiment.updates(experiment.networks, batch):
                optimizer.zero_grad()
                update.loss.backward()
                optimizer.step()
    with torch.no_grad():
        total = sum(experiment.evaluate(batch) for batch in data.validation(0, 1))
    assert experiment.val_means(total)["accuracy"] > 0.5


@pytest.mark.parametrize(("depth", "sizes"), [
    (1, [(6, 7), (5, 6)]), (2, [(6, 7), (4, 6), (5, 4)]), (3, [(6, 7), (4, 6), (3, 4), (5, 3)]),
])  # fmt: skip
def test_the_depth_of_a_jet_mlp_says_how_many_of_its_layers_are_there(jets, depth, sizes):
    model = JetMlp(width_1=6, width_2=4, width_3=3, depth=depth)
    assert [tuple(each.shape) for each in model.parameters() if each.ndim == 2] == sizes
    assert model(jets).shape == (12, 5)


@pytest.mark.parametrize(("depth", "message"), [
    (0, "depth = 0 is not 1, 2 or 3"),
    (4, "depth = 4 is not 1, 2 or 3"),
    (2, r"depth = 2, but the widths of these layers are \[6, 0\]"),
])  # fmt: skip
def test_a_jet_mlp_without_the_layers_that_it_should_have_is_refused(depth, message):
    with pytest.raises(ValueError, match=message):
        JetMlp(width_1=6, depth=depth)


@pytest.mark.parametrize(("channels", "kernel"), [(4, 3), (8, 5)])
def test_the_digit_network_reads_images_of_bytes(channels, kernel):
    images = torch.randint(0, 256, (3, 28, 28)).float()
    assert ConvNet(channels=channels, kernel=kernel, dropout=0.1)(images).shape == (3, 10)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_can_be_named(name):
    assert activation(name)(torch.ones(2)).shape == (2,)


def test_an_unknown_activation_lists_those_that_there_are():
    with pytest.raises(ValueError, match="no activation 'swish', only relu, selu, elu, gelu, tanh"):
        DeepSets(activation="swish")


# -- losses and metrics ----------------------------------------------------------------------------


def measured(outputs: object, targets: object, loss: str, *metrics: str) -> list[float]:
    """Loss and metrics of a model that gives `outputs`, whatever it is asked."""

    class Fixed(torch.nn.Module):
        def forward(self, x):
            return outputs

    experiment = Supervised(Fixed(), Training(loss=loss, metrics=list(metrics)))
    num = len(next(iter(outputs.values())) if isinstance(outputs, dict) else outputs)
    sums = experiment.evaluate(Batch(torch.zeros(num), targets, num, num))
    return list(experiment.val_means(sums).values())


def test_accuracy_counts_class_numbers_one_hot_and_single_logits_alike():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [2.0, 0.0]])
    classes = torch.tensor([0, 1, 0, 1])
    single = logits[:, 1:] - logits[:, :1]  # (B, 1)
    hot = one_hot(classes).float()
    assert measured(logits, classes, "cross_entropy", "accuracy")[1] == 0.5
    assert measured(logits, hot, "cross_entropy", "accuracy")[1] == 0.5
    assert measured(single, classes, "bce", "accuracy")[1] == 0.5
    assert measured(single[:, 0], classes.float(), "bce", "accuracy")[1] == 0.5


def test_losses_equal_their_formulas():
    logits = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    classes = torch.tensor([0, 0])
    softmax = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(axis=1, keepdims=True)
    expected = -np.log(softmax[:, 0]).mean()
    hot = one_hot(classes, 2).float()
    assert measured(logits, classes, "cross_entropy") == pytest.approx([expected])
    assert measured(logits, hot, "cross_entropy") == pytest.approx([expected])
    assert measured(logits.log_softmax(1), hot, "nll_loss") == pytest.approx([expected])
    values, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 5.0])
    assert measured(values, targets, "mse", "mse", "mae") == pytest.approx([2.5, 2.5, 1.5])
    assert measured(values, targets, "mae") == pytest.approx([1.5])
    assert measured(values, targets, "smooth_l1_loss") == pytest.approx([(0.5 + 1.5) / 2])


def test_several_targets_add_their_losses():
    outputs = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[2.0], [2.0]])}
    targets = {"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([0.0, 0.0])}
    assert measured(outputs, targets, "mse") == pytest.approx([1.0 + 4.0])
