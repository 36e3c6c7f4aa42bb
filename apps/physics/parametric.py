"""Electron showers of a silicon-tungsten calorimeter from formulas, as many as are asked for.

    python -m apps.physics.parametric showers.h5 --events 100000 --energy 10 100 --seed 1

A shower is a gamma distribution in depth that fluctuates from event to event, a core and a tail in
radius that widen with depth, and Poisson-distributed energy spots, which give the sampling
fluctuation, the hits and the cell spectrum. A core makes thousands a second. They are not Geant4:
use them where the number of events matters, and the Geant4 files where physics does.

Formulas: E. Longo, I. Sestili, Nucl. Instrum. Meth. 128 (1975) 283 (depth); G. Grindhammer,
S. Peters, hep-ex/0001020 (fluctuations, radius, spots). Depths are in radiation lengths (X0), radii
in Moliere radii, energies in GeV.

Events are simulated in blocks of 50, each with its own random stream, made of the seed and the
block's number. So a million events can be written in parts, by as many processes at once:

    for part in 0 1 2 3; do
        python -m apps.physics.parametric part$part.h5 --events 250000 --energy 10 100 --seed 1 \
            --first-event $((part * 250000)) &
    done
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import h5py
import numpy as np
import scipy
from scipy.special import gammainc

from apps.contract import VERSION, N3LOError
from apps.new_h5 import new_h5

BLOCK_EVENTS = 50  # also the HDF5 chunk, as in the Geant4 files
ENERGY_LIMITS_GEV = (5.0, 500.0)  # the constants are tuned on 10 to 100 GeV
ELECTRON = 11  # PDG number
COMPRESSION = 1  # of gzip; level 4 makes files 15 % smaller and takes 70 % longer
USER_ERROR = 2
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Calorimeter:
    """A sampling calorimeter, and the constants of the showers in it.

    The geometry is that of k4geo's CLIC_o2_v01 ECalBarrel: 17 layers of 2.4 mm and 8 of 4.8 mm
    tungsten alloy, each read out by 0.5 mm silicon behind it. Constants marked "GP" are those of
    Grindhammer and Peters for Z = 70, as in Geant4's GFlash; the others are fitted to the 2000
    Geant4 11.3.2 showers in studies/data, and hold for this geometry.
    """

    num_cells: int = 25  # along x and along y
    cell_mm: float = 5.1
    layer_x0: tuple[float, ...] = (0.6484,) * 17 + (1.2593,) * 8
    moliere_radius_mm: float = 15.0  # with the gaps between the tungsten plates
    critical_energy_gev: float = 8e-3  # of tungsten; 610 MeV / (Z + 1.24) is 8.1 MeV
    threshold_gev: float = 1e-6  # a cell below it reads zero

    sampling_fraction: float = 0.02465  # silicon signal over shower energy, in the thin layers
    start_x0: float = 0.60  # how far before the calorimeter the gamma distribution begins
    maximum: float = -0.10  # T = ln y + maximum
    shape: tuple[float, float] = (2.667, 0.375)  # alpha = shape[0] + shape[1] ln y
    sigma_maximum: tuple[float, float] = (-2.4, 1.4)  # of ln T, 1 / (s[0] + s[1] ln y)
    sigma_shape: float = 0.125  # of ln alpha
    correlation: float = 0.2  # of ln T and ln alpha
    track_gev: float = 0.4e-3  # in the first silicon, of the electron before it showers
    track_x0: float = 3.0  # the depth over which the track fades

    spot_gev: float = 0.33e-3  # mean energy of a spot
    spot_shape: float = 1.5  # of the gamma distribution of its energy

    core: tuple[float, float, float] = (0.0038, 0.00319, 0.109)  # 1, ln E (GP), tau
    tail: tuple[float, float, float] = (0.4145, 0.333, 0.0228)  # k1; k4 = [1] + [2] ln E
    tail_slope: float = 2.59  # GP: k3
    tail_tau: float = 0.645  # GP: k2
    core_share: tuple[float, float] = (2.394, 0.532)  # p1, p2 (GP)
    core_share_width: tuple[float, float] = (1.058, -0.0686)  # p3 = [0] + [1] ln E (GP)

    @property
    def silicon_x0(self) -> np.ndarray:
        """Depth of each layer's silicon, which lies behind its tungsten: (layers,)."""
        return np.cumsum(self.layer_x0)


CLIC = Calorimeter()


def generate(energies: np.ndarray, seed: int, calorimeter: Calorimeter = CLIC) -> np.ndarray:
    """Showers of electrons that enter along the layers' axis, somewhere in the central cell.

    Args:
        energies: (N,) GeV, within ENERGY_LIMITS_GEV.
        seed: not negative; the same seed and energies give the same showers.

    Returns:
        (N, x, y, layer) float32: the energy in each cell's silicon, GeV. As in the Geant4 files,
        cells below the threshold are zero and values have 10 mantissa bits.

    Raises:
        N3LOError: an energy is out of limits, or the seed is negative.
    """
    energies = np.asarray(energies, np.float64)
    _check(energies, seed)
    cells = (calorimeter.num_cells, calorimeter.num_cells, len(calorimeter.layer_x0))
    showers = np.empty((len(energies), *cells), np.float32)
    for start in range(0, len(energies), BLOCK_EVENTS):
        block = slice(start, start + BLOCK_EVENTS)
        rng = _stream(seed, start // BLOCK_EVENTS, "showers")
        _simulate(energies[block], rng, calorimeter, out=showers[block])
    return showers


def write(
    path: str | Path,
    num_events: int,
    energy_range_gev: tuple[float, float],
    seed: int,
    first_event: int = 0,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write showers of electrons with uniformly distributed energies as HDF5.

    Datasets, attributes and units are those of the Geant4 files; the attributes say that the
    showers are parametric, and hold the seed and every constant. An existing file is replaced
    once the new one is complete; if it cannot be completed, nothing is left of it.

    Args:
        first_event: the file holds the events from this one on of an endless file of this seed and
            energy range, so that parts written by several processes are the same events as
            one file's.
        progress: called with the number of events written so far.

    Raises:
        N3LOError: an argument is out of range, or the file cannot be written.
    """
    _check(np.asarray(energy_range_gev, np.float64), seed)
    if energy_range_gev[0] > energy_range_gev[1]:
        raise N3LOError(f"energy: the range {_text(energy_range_gev)} GeV is reversed")
    if num_events < 1:
        raise N3LOError(f"events: {num_events} is not at least 1")
    if first_event < 0:
        raise N3LOError(f"first event: {first_event} is negative")
    with new_h5(Path(path)) as (file, check_disk):
        _label(file, energy_range_gev, seed, first_event)
        datasets = _create(file, num_events)
        written = 0
        events = range(first_event, first_event + num_events)
        for block in _blocks(events, energy_range_gev, seed):
            size = len(block["energy"])
            for name, values in block.items():
                datasets[name][written : written + size] = values
            check_disk()
            written += size
            if progress:
                progress(written)


def layer_energies(
    energies: np.ndarray, fluctuations: np.ndarray, calorimeter: Calorimeter = CLIC
) -> tuple[np.ndarray, np.ndarray]:
    """The expected energy in each layer's silicon, and each layer's depth in the shower.

    (1/E) dE/dt = beta (beta t)^(alpha-1) e^(-beta t) / Gamma(alpha) with the maximum at
    T = (alpha-1)/beta (Longo and Sestili). ln T and ln alpha depend on ln y, y = E over the
    critical energy, and fluctuate as correlated normal variables (Grindhammer and Peters).
    Silicon samples the shower at one depth, whatever the thickness of its tungsten: it reads the
    mean of dE/dt over that thickness, centred on itself.

    Args:
        energies: (N,) GeV.
        fluctuations: (N, 2) standard normal; zeros give the average shower.

    Returns:
        (N, layers) GeV, and (N, layers) tau = t/T.
    """
    log_y = np.log(energies / calorimeter.critical_energy_gev)[:, None]  # (N, 1)
    first, second = fluctuations[:, :1], fluctuations[:, 1:]
    rho = calorimeter.correlation
    spread = 1 / (calorimeter.sigma_maximum[0] + calorimeter.sigma_maximum[1] * log_y)
    maximum = (log_y + calorimeter.maximum) * np.exp(spread * first)
    alpha = (calorimeter.shape[0] + calorimeter.shape[1] * log_y) * np.exp(
        calorimeter.sigma_shape * (rho * first + np.sqrt(1 - rho**2) * second)
    )
    beta = (alpha - 1) / maximum

    thickness = np.array(calorimeter.layer_x0)
    depth = calorimeter.start_x0 + calorimeter.silicon_x0
    deposited = gammainc(alpha, beta * (depth + thickness / 2))
    deposited -= gammainc(alpha, beta * (depth - thickness / 2))
    seen = calorimeter.sampling_fraction * thickness[0] / thickness
    track = calorimeter.track_gev * np.exp(
        -(calorimeter.silicon_x0 - thickness) / calorimeter.track_x0
    )
    return energies[:, None] * seen * deposited + track, depth / maximum


def radial_profile(
    energies: np.ndarray, tau: np.ndarray, calorimeter: Calorimeter = CLIC
) -> tuple[np.ndarray, np.ndarray]:
    """The shares and radii of the shower's core and tail (Grindhammer and Peters).

    f(r) = sum of share 2 r R^2 / (r^2 + R^2)^2 over both. The core widens linearly with depth; the
    tail is wide at the start (secondaries scatter off) and at the end.

    Args:
        energies: (N,) GeV.
        tau: (N, layers), depth over depth of the maximum.

    Returns:
        Shares (N, layers, 2) that add up to 1, and radii (N, layers, 2) in Moliere radii.
    """
    log_e = np.log(energies)[:, None]
    k1, *k4 = calorimeter.tail
    p1, p2 = calorimeter.core_share
    core = calorimeter.core[0] + calorimeter.core[1] * log_e + calorimeter.core[2] * tau
    beyond = tau - calorimeter.tail_tau
    tail = k1 * (
        np.exp(-calorimeter.tail_slope * beyond) + np.exp((k4[0] + k4[1] * log_e) * beyond)
    )
    width = calorimeter.core_share_width[0] + calorimeter.core_share_width[1] * log_e
    early = (p2 - tau) / width
    share = np.minimum(p1 * np.exp(early - np.exp(early)), 1)
    return np.stack([share, 1 - share], axis=-1), np.stack([core, tail], axis=-1)


def scatter(radii: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points (x, y) at distances of density 2 r R^2 / (r^2 + R^2)^2 for radii R (N,), any azimuth.

    The distribution function r^2 / (r^2 + R^2) is inverted, in float32 to halve the memory.
    """
    u = rng.random(len(radii), np.float32)  # below 1
    distance = radii * np.sqrt(u / (1 - u))
    azimuth = np.float32(2 * np.pi) * rng.random(len(radii), np.float32)
    return distance * np.cos(azimuth), distance * np.sin(azimuth)


def _simulate(
    energies: np.ndarray, rng: np.random.Generator, calorimeter: Calorimeter, out: np.ndarray
) -> np.ndarray:
    """Put showers (N, x, y, layer) in GeV into `out`; return impact points (N, 2) in mm.

    With another array of that size here, malloc would give memory back and take it again each time.
    """
    num_events, num_cells = len(energies), calorimeter.num_cells
    impact = rng.uniform(-0.5, 0.5, (num_events, 2))  # in cells
    expected, tau = layer_energies(energies, rng.standard_normal((num_events, 2)), calorimeter)
    shares, radii = radial_profile(energies, tau, calorimeter)
    radii *= calorimeter.moliere_radius_mm / calorimeter.cell_mm
    # Core and tail of a Poisson process are Poisson themselves: no spot has to choose.
    counts = rng.poisson(expected[..., None] * shares / calorimeter.spot_gev)

    cells = _cells_of_spots(counts, radii, impact + num_cells / 2, num_cells, rng)
    spots = rng.standard_gamma(calorimeter.spot_shape, len(cells), np.float32)
    spots *= np.float32(calorimeter.spot_gev / calorimeter.spot_shape)
    out[:] = np.bincount(cells, spots, out.size + 1)[: out.size].reshape(out.shape)
    _read_out(out, calorimeter.threshold_gev)
    return impact * calorimeter.cell_mm


def _cells_of_spots(
    counts: np.ndarray,
    radii: np.ndarray,
    centre: np.ndarray,
    num_cells: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """The cell that each spot hits, as an index of the flat (N, x, y, layer) array.

    A spot beside the calorimeter gets the index after the last. Lengths are in cells.

    Args:
        counts: (N, layers, 2) spots of core and tail.
        radii: (N, layers, 2) of core and tail.
        centre: (N, 2) of the showers.
    """
    num_events, num_layers, _ = counts.shape

    def of_each_spot(values: np.ndarray) -> np.ndarray:
        return np.repeat(np.broadcast_to(values, counts.shape), counts.ravel())

    x, y = scatter(of_each_spot(radii.astype(np.float32)), rng)
    x += of_each_spot(centre[:, 0, None, None].astype(np.float32))
    y += of_each_spot(centre[:, 1, None, None].astype(np.float32))
    first = np.arange(num_events)[:, None] * num_cells**2 * num_layers + np.arange(num_layers)
    cells = of_each_spot(first[..., None].astype(np.int32))
    cells += (x.astype(np.int32) * num_cells + y.astype(np.int32)) * num_layers
    outside = (x < 0) | (x >= num_cells) | (y < 0) | (y >= num_cells)
    cells[outside] = num_events * num_cells**2 * num_layers
    return cells


def _read_out(showers: np.ndarray, threshold_gev: float) -> None:
    """Keep, in place, 10 mantissa bits and nothing below the threshold: files are half as large."""
    showers *= showers >= threshold_gev
    bits = showers.view(np.uint32)
    dropped = np.uint32(13)  # of 23
    bits += np.uint32(1) << (dropped - np.uint32(1))  # to the nearest
    bits >>= dropped
    bits <<= dropped


def _stream(seed: int, block: int, purpose: str) -> np.random.Generator:
    key = (block, ("energies", "showers").index(purpose))
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _blocks(
    events: range, energy_range_gev: tuple[float, float], seed: int
) -> Iterator[dict[str, np.ndarray]]:
    """The datasets of these events, a block at a time.

    A block is always simulated in full, so that the events do not depend on where a file ends. The
    array of showers is the same for all blocks.
    """
    cells = (CLIC.num_cells, CLIC.num_cells, len(CLIC.layer_x0))
    showers = np.empty((BLOCK_EVENTS, *cells), np.float32)
    for block in range(events.start // BLOCK_EVENTS, -(-events.stop // BLOCK_EVENTS)):
        rng = _stream(seed, block, "energies")
        energies = rng.uniform(*energy_range_gev, BLOCK_EVENTS).astype(np.float32)
        rng = _stream(seed, block, "showers")
        impact = _simulate(energies.astype(np.float64), rng, CLIC, out=showers)
        values = {
            "ECAL": showers,
            "ECAL_E": showers.sum(axis=(1, 2, 3)),
            "energy": energies,
            "pdgID": np.full(BLOCK_EVENTS, ELECTRON, np.int32),
            "target": np.stack([np.full_like(energies, ELECTRON), energies], axis=1),
            "theta": np.full(BLOCK_EVENTS, np.pi / 2, np.float32),
            "vertex_xy": impact.astype(np.float32),
        }
        start = block * BLOCK_EVENTS
        kept = slice(max(events.start - start, 0), min(events.stop - start, BLOCK_EVENTS))
        yield {name: each[kept] for name, each in values.items()}


def _create(file: h5py.File, num_events: int) -> dict[str, h5py.Dataset]:
    cells = (CLIC.num_cells, CLIC.num_cells, len(CLIC.layer_x0))
    datasets = {
        "ECAL": file.create_dataset(
            "ECAL",
            (num_events, *cells),
            np.float32,
            chunks=(min(BLOCK_EVENTS, num_events), *cells),
            compression="gzip",
            compression_opts=COMPRESSION,
            shuffle=True,
        )
    }
    for name, columns in {"target": (2,), "vertex_xy": (2,)}.items():
        datasets[name] = file.create_dataset(name, (num_events, *columns), np.float32)
    for name in ("ECAL_E", "energy", "theta"):
        datasets[name] = file.create_dataset(name, (num_events,), np.float32)
    datasets["pdgID"] = file.create_dataset("pdgID", (num_events,), np.int32)
    for name, unit in {"ECAL": "GeV", "energy": "GeV", "vertex_xy": "mm"}.items():
        datasets[name].attrs["unit"] = unit
    return datasets


def _label(
    file: h5py.File, energy_range_gev: tuple[float, float], seed: int, first_event: int
) -> None:
    """What the file is, and all that its events depend on."""
    file.attrs["kind"] = "parametric"
    file.attrs["simulation"] = (
        "parametric formulas (apps.physics.parametric), never Geant4: for scaling tests, not for "
        "physics; Longo and Sestili 1975, Grindhammer and Peters hep-ex/0001020"
    )
    file.attrs["geometry"] = (
        f"{len(CLIC.layer_x0)} layers of tungsten and 0.5 mm silicon, "
        f"{CLIC.silicon_x0[-1]:.1f} X0, as key4hep/k4geo CLIC_o2_v01 ECalBarrel; "
        f"cells {CLIC.cell_mm} x {CLIC.cell_mm} mm; axes x, y, layer"
    )
    file.attrs["particle"] = (
        f"e-, uniform {_text(energy_range_gev)} GeV, normal incidence, impact point uniform in "
        "the central cell"
    )
    file.attrs["processing"] = "cell threshold 1 keV, values rounded to 10 mantissa bits"
    file.attrs["constants"] = json.dumps(dataclasses.asdict(CLIC))
    file.attrs["energy_range_gev"] = energy_range_gev
    file.attrs["seed"] = seed
    file.attrs["first_event"] = first_event
    file.attrs["versions"] = f"n3lo {VERSION}, numpy {np.__version__}, scipy {scipy.__version__}"


def _check(energies: np.ndarray, seed: int) -> None:
    low, high = ENERGY_LIMITS_GEV
    wrong = energies[~((energies >= low) & (energies <= high))]  # nan too
    if wrong.size:
        raise N3LOError(
            f"energy: {wrong[0]:g} GeV is outside the formulas' range, {low:g} to {high:g} GeV"
        )
    if seed < 0:
        raise N3LOError(f"seed: {seed} is negative")


def _text(energy_range_gev: tuple[float, float]) -> str:
    return f"{energy_range_gev[0]:g}-{energy_range_gev[1]:g}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise N3LOError(f"{message}; see '{self.prog} --help'")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m apps.physics.parametric",
        description="Write parametric (not Geant4) electron showers as HDF5, for scaling tests.",
    )
    parser.add_argument("out", type=Path, metavar="OUT.h5")
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument(
        "--energy", type=float, nargs=2, required=True, metavar=("LOW", "HIGH"), help="GeV"
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--first-event", type=int, default=0, help="of this part of a larger set of events"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT.h5")
    return parser


def _progress(num_events: int) -> Callable[[int], None]:
    """A line on the terminal that is rewritten as the events are."""
    start = time.perf_counter()

    def show(written: int) -> None:
        rate = written / (time.perf_counter() - start)
        end = "\n" if written == num_events else ""
        line = f"\r{written} of {num_events} events, {rate:.0f} events/s"
        print(line, end=end, file=sys.stderr, flush=True)

    return show


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        options = _parser().parse_args(argv)
        if options.out.exists() and not options.overwrite:
            raise N3LOError(f"'{options.out}' exists; give another name, or --overwrite")
        write(
            options.out,
            options.events,
            tuple(options.energy),
            options.seed,
            options.first_event,
            _progress(options.events) if sys.stderr.isatty() else None,
        )
    except N3LOError as error:
        print(f"parametric: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("parametric: interrupted; nothing is written", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
