"""A small convolutional network for handwritten digits."""

from __future__ import annotations

import torch
from torch import nn

from apps.models.layers import activation as make_activation


class ConvNet(nn.Module):
    """Two convolutions, each halving the image, and a linear layer.

    Args:
        channels: of the first convolution; the second has twice as many.
        kernel: side of both kernels, in pixels; odd.
    """

    def __init__(
        self,
        channels: int = 8,
        kernel: int = 3,
        dropout: float = 0.0,
        activation: str = "relu",
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, kernel, padding=kernel // 2),
            make_activation(activation),
            nn.MaxPool2d(2),  # (B, C, 14, 14)
            nn.Conv2d(channels, 2 * channels, kernel, padding=kernel // 2),
            make_activation(activation),
            nn.MaxPool2d(2),  # (B, 2C, 7, 7)
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 7 * 7, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images of 0 to 255, (B, 28, 28) -> logits (B, num_classes)."""
        return self.layers(images.unsqueeze(1) / 255)
