"""The line of a shell script that started NNLO: driver, words, and number of ranks."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from apps.contract import N3LOError
from workflow.nnlo.options import ENVIRONMENT, GAN, OPTIMIZATION, TRAINING

# How launchers are told the number of ranks; LSF's -a are ranks of each of -n resource sets.
RANKS = ("-n", "-np", "--np", "--ntasks", "--nrs")
RANKS_OF_EACH = ("-a", "--tasks_per_rs")
READERS = ("echo", "cat", "cp", "ls", "vi", "vim")  # whose words are no drivers that start
DRIVERS = {Path(name).stem: name for name in (TRAINING, OPTIMIZATION, GAN)}


@dataclass(frozen=True)
class Line:
    """How NNLO was started."""

    driver: str
    words: list[str]  # behind the driver's name
    num_ranks: int | None  # None = the line does not say
    environment: list[str]  # names of variables that NNLO read, set on the line or above it


def read(given: str) -> Line:
    """The line, or the one in a script, that starts a driver of NNLO.

    Raises:
        N3LOError: there is none.
    """
    path = Path(given)
    if not any(name in given for name in DRIVERS) or os.path.isfile(given):  # no long line is
        try:
            given = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise N3LOError(f"--from-script: '{path}' cannot be read: {reason}") from None
    found = list(_lines(given))
    if not found:
        raise N3LOError(f"--from-script: '{path}': no line starts {' or '.join(DRIVERS.values())}")
    if len(found) > 1:
        raise N3LOError(
            f"--from-script: '{path}' starts NNLO {len(found)} times; give the line that you mean, "
            "in quotes"
        )
    return found[0]


def _lines(text: str) -> Iterator[Line]:
    assigned: dict[str, str] = {}
    of_slurm = re.search(r"^#SBATCH\s+(?:-n\s*|--ntasks[= ])(\d+)", text, re.M)
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        for words in _commands(line, assigned):
            command = list(_assign(words, assigned))
            place = next((i for i, word in enumerate(command) if Path(word).stem in DRIVERS), None)
            if place is None or command[0] in READERS:
                continue
            launcher = command[:place]
            num_ranks = _num_ranks(launcher)
            if num_ranks is None and "srun" in launcher and of_slurm is not None:
                num_ranks = int(of_slurm[1])
            yield Line(
                driver=DRIVERS[Path(command[place]).stem],
                words=command[place + 1 :],
                num_ranks=num_ranks,
                environment=[name for name in ENVIRONMENT if name in assigned],
            )


def _assign(words: Sequence[str], assigned: dict[str, str]) -> Iterator[str]:
    """The words of a command but those in front that set variables, which are remembered."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            assigned[name] = value
        elif word != "export":
            yield from words[i:]
            return


def _commands(line: str, assigned: Mapping[str, str]) -> list[list[str]]:
    """The commands of a line, as words without redirections."""
    line = re.sub(r"(?<=\s)(?:[012]?>>?|&>)\s*(?:&\d|\S+)", " ", line)
    line = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda m: assigned.get(m[1], m[0]), line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set("|&;"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError as error:  # quotes that go on in the next line
        if any(name in line for name in DRIVERS):
            raise N3LOError(f"--from-script: {error}: {line.strip()}") from None
    return commands


def _num_ranks(launcher: Sequence[str]) -> int | None:
    """Of the words before the driver, such as mpirun -np 7, or srun --ntasks=7."""
    sets, of_each = _number(launcher, RANKS), _number(launcher, RANKS_OF_EACH)
    return None if sets is None else sets * (of_each or 1)


def _number(words: Sequence[str], names: Sequence[str]) -> int | None:
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else "".join(words[i + 1 : i + 2])
        elif match := re.fullmatch(r"(-[a-z])(\d+)", word):  # -n4
            if match[1] not in names:
                continue
            text = match[2]
        else:
            continue
        if not text.isdecimal():
            raise N3LOError(
                f"--from-script: '{name} {text}' is no number of ranks; give the line in quotes "
                "with the number"
            )
        return int(text)
    return None
