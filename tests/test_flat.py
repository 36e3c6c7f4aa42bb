"""Parameters as views of one vector: what it needs of a model, and what a model may do to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apps.contract import N3LOError
from apps.strategies.flat import HUGE_PAGE, Flat, zeros
from apps.strategies.memory import Memory, require_gpu_aware


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_the_vector_is_the_parameters_and_its_gradient_theirs():
    model = network()
    before = torch.cat([each.detach().flatten() for each in model.parameters()])
    flat = Flat({"model": model})
    assert torch.equal(flat.values, before)
    flat.values.zero_()
    assert all((each == 0).all() for each in model.parameters())
    flat.attach_gradients()
    model(torch.ones(5, 3)).sum().backward()
    expected = torch.cat([each.grad.flatten() for each in model.parameters()])
    assert torch.equal(flat.gradient, expected)


def test_buffers_and_frozen_parameters_are_not_in_it():
    model = network()
    model[0].weight.requires_grad_(False)
    assert len(Flat({"model": model})) == 4 + 8 + 8 + 2


def test_a_model_may_drop_its_gradients():
    """zero_grad() sets them to None: the next backward pass must still fill the vector."""
    model = network()
    flat = Flat({"model": model})
    model.zero_grad()
    flat.attach_gradients()
    model(torch.randn(5, 3)).square().sum().backward()
    assert flat.gradient.abs().sum() > 0


def test_a_model_that_moves_its_parameters_is_named():
    model = network()
    flat = Flat({"model": model})
    flat.check()
    model[2].weight.data = model[2].weight.data.clone()
    with pytest.raises(N3LOError, match="gave its parameters new memory"):
        flat.check()


def test_parameters_of_two_types_are_refused():
    model = network()
    model[2].double()
    with pytest.raises(N3LOError, match=r"torch.float32, torch.float64; .* needs one type"):
        Flat({"model": model})


def test_a_model_without_parameters_is_refused():
    with pytest.raises(N3LOError, match="no parameters to train"):
        Flat({"model": nn.ReLU()})


def test_networks_that_share_parameters_are_refused():
    first = network()
    second = nn.Sequential(first[0], nn.Linear(4, 1))
    with pytest.raises(N3LOError, match="two networks share parameters"):
        Flat({"model": first, "rival": second})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_piece_is_sent_as_its_bytes_whatever_the_type(dtype):
    vector = torch.arange(10).to(dtype)
    flat = Flat({"model": nn.Linear(2, 4, bias=False)}, num_masters=2)
    [_, second] = flat.pieces["model"]
    buffer, _ = Memory(vector).raw(second)
    assert bytes(buffer) == vector[4:8].view(torch.uint8).numpy().tobytes()


def test_large_vectors_begin_at_zero_and_can_be_written():
    vector = zeros(HUGE_PAGE // 4 + 3, torch.float32)
    assert len(vector) == HUGE_PAGE // 4 + 3
    assert not vector.any()
    vector[-1] = 1.0
    assert vector.sum() == 1


def test_an_mpi_that_cannot_read_a_gpu_is_known_without_touching_one():
    """The Open MPI of our set-up is built without CUDA."""
    with pytest.raises(N3LOError, match=r"gpu_aware: this MPI does not say .* \(Open MPI"):
        require_gpu_aware()
