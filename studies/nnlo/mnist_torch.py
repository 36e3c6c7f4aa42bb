"""Handwritten digits for NNLO, as its users wrote such a file: a network, its ranges, its data."""

import glob
import os

import torch.nn as nn
import torch.nn.functional as F
from skopt.space import Integer, Real


class DigitNet(nn.Module):
    def __init__(self, channels=8, dense=64, dropout=0.3):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, kernel_size=5)
        self.conv2 = nn.Conv2d(channels, 2 * channels, kernel_size=5)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(2 * channels * 16, dense)
        self.fc2 = nn.Linear(dense, 10)

    def forward(self, x):
        x = x.permute(0, 3, 1, 2).float() / 255  # (B, 28, 28, 1), 0 to 255
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return self.fc2(x)


def get_model(**args):
    return DigitNet(**args)


get_model.parameter_range = [
    Integer(4, 16, name="channels"),
    Integer(32, 128, name="dense"),
    Real(0.0, 0.6, name="dropout"),
]


def get_name():
    return "mnist"


def get_all():
    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.environ.get("N3LO", os.path.join(here, "..", ".."))
    return sorted(glob.glob(os.path.join(folder, "studies", "data", "mnist_part*.h5")))


def get_train():
    files = get_all()
    return files[: int(len(files) * 0.75)]


def get_val():
    files = get_all()
    return files[int(len(files) * 0.75) :]


def get_features():
    return "features"


def get_labels():
    return "labels"
