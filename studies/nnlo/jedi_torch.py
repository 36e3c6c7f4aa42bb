"""A JEDI-net for NNLO, as its users wrote such a file: for one size of jets, and for a GPU.

The network: Moreno et al. 2020, arXiv:1908.05318.
"""

import os

import numpy as np
import torch
import torch.nn as nn
from skopt.space import Categorical, Integer

PARTICLES, FEATURES, CLASSES = 100, 16, 5
ACTIVATIONS = [nn.functional.relu, nn.functional.elu, nn.functional.selu]


class Block(nn.Module):
    def __init__(self, inputs, hidden, outputs, activation, last=True):
        super().__init__()
        self.layers = nn.ModuleList([
            nn.Linear(inputs, hidden).cuda(),
            nn.Linear(hidden, hidden // 2).cuda(),
            nn.Linear(hidden // 2, outputs).cuda(),
        ])  # fmt: skip
        self.activation = ACTIVATIONS[activation]
        self.last = last

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        x = self.layers[-1](x)
        return self.activation(x) if self.last else x


class JediNet(nn.Module):
    def __init__(self, hidden, De, Do, fr_act, fo_act, fc_act):
        super().__init__()
        pairs = [(r, s) for r in range(PARTICLES) for s in range(PARTICLES) if r != s]
        receivers, senders = torch.tensor(pairs).T
        self.Rr = nn.functional.one_hot(receivers, PARTICLES).T.float().contiguous().cuda()
        self.Rs = nn.functional.one_hot(senders, PARTICLES).T.float().contiguous().cuda()
        self.fr = Block(2 * FEATURES, hidden, De, fr_act)
        self.fo = Block(FEATURES + De, hidden, Do, fo_act)
        self.fc = Block(Do, hidden, CLASSES, fc_act, last=False)

    def forward(self, x):
        x = x.float()  # (B, features, particles)
        edges = torch.cat([x @ self.Rr, x @ self.Rs], dim=1)
        effects = self.fr(edges.transpose(1, 2)).transpose(1, 2)
        x = torch.cat([x, effects @ self.Rr.T], dim=1)
        x = self.fo(x.transpose(1, 2))
        return self.fc(x.sum(dim=1))


def get_model(**args):
    best = {"hidden": 50, "De": 14, "Do": 10, "fr_act": 2, "fo_act": 2, "fc_act": 2}
    return JediNet(**{**best, **args})


get_model.parameter_range = [
    Integer(10, 100, name="hidden"),
    Integer(10, 100, name="De"),
    Integer(10, 100, name="Do"),
    Categorical([0, 1, 2], name="fr_act"),
    Categorical([0, 1, 2], name="fo_act"),
    Categorical([0, 1, 2], name="fc_act"),
]


def get_name():
    return "hls4ml-jedi"


def get_all():
    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.environ.get("N3LO", os.path.join(here, "..", ".."))
    return [os.path.join(folder, "studies", "data", "lhc_jets_pythia8_2000x100x16.h5")]


def get_train():
    return get_all()


def get_val():
    return get_all()


def get_features():
    return "jetConstituentList", lambda x: np.swapaxes(x, 1, 2)


def get_labels():
    return "jets", lambda y: y[0:, -6:-1]
