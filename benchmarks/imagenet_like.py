"""Images in the shape of ImageNet, of any number, size and classes, that a network can learn.

    python benchmarks/imagenet_like.py --events 2000 --size 224 --classes 1000 --to imagenet_like.h5

An image is a plane wave in colour, with noise: a class has its wave and its colours, an image its
phase. They are written chunk by chunk, so that a file may be larger than the memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from apps.contract import N3LOError
from apps.new_h5 import new_h5

CHUNK_EVENTS = 16
CONTRAST, NOISE = 60.0, 30.0  # of a pixel, which is 0 to 255
MOST_WAVES = 12  # across an image


def write(path: Path, events: int, size: int, classes: int, seed: int = 1) -> None:
    """Write `images` (events, size, size, 3) uint8, and `labels` (events,), each class as often.

    Raises:
        N3LOError: the file cannot be written.
    """
    rng = np.random.default_rng(seed)
    waves = rng.uniform(-MOST_WAVES, MOST_WAVES, (classes, 2))
    colours = rng.uniform(-1, 1, (classes, 3))
    labels = rng.permutation(np.arange(events) % classes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_h5(path) as (file, check):
        chunk = min(CHUNK_EVENTS, events)
        images = file.create_dataset(
            "images", (events, size, size, 3), np.uint8, chunks=(chunk, size, size, 3)
        )
        file["labels"] = labels.astype(np.int32)
        for first in range(0, events, chunk):
            of_class = labels[first : first + chunk]
            images[first : first + chunk] = draw(waves[of_class], colours[of_class], size, rng)
            check()


def draw(waves: np.ndarray, colours: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Images of B events, (B, size, size, 3) uint8.

    Args:
        waves: across the image along y and x, (B, 2).
        colours: what a crest adds to red, green and blue, in units of the contrast, (B, 3).
    """
    place = np.arange(size, dtype=np.float32) / size
    turns = waves[:, 0, None, None] * place[:, None] + waves[:, 1, None, None] * place
    crests = np.cos(2 * np.pi * (turns + rng.random((len(waves), 1, 1)))).astype(np.float32)
    pixels = 128 + CONTRAST * crests[..., None] * colours[:, None, None].astype(np.float32)
    pixels += NOISE * rng.standard_normal(pixels.shape, np.float32)
    return pixels.clip(0, 255).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--size", type=int, default=224, help="of each side, in pixels")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--to", type=Path, required=True, help="the HDF5 file")
    given = parser.parse_args()
    for name in ("events", "size", "classes"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)} is not at least 1")
    try:
        write(given.to, given.events, given.size, given.classes, given.seed)
    except (N3LOError, OSError) as error:
        parser.error(f"--to: {error}")
    megabytes = given.to.stat().st_size / 1e6
    print(f"{given.to}: {given.events} images of {given.size} x {given.size}, "
          f"{given.classes} classes, {megabytes:.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
