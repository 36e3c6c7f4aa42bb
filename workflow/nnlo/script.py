"""The line of a shell script that started NNLO: driver, words, and number of ranks."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from apps.contract import N3LOError
from sites.launchers import FLAGS, FLAGS_OF_OTHERS
from workflow.nnlo.options import ENVIRONMENT, GAN, OPTIMIZATION, TRAINING

DRIVERS = {Path(name).stem: name for name in (TRAINING, OPTIMIZATION, GAN)}
DRIVER = re.compile(rf"(?:.*[/.])?({'|'.join(DRIVERS)})(?:\.py)?")  # also as python -m has it
OLDER = re.compile(r"MPIDriver\.py|hyperparameter_search\w*\.py")  # of mpi_learn and mpi_opt
KEYWORDS = ("if", "then", "else", "elif", "do", "while", "time", "exec", "nohup", "!", "{", "(")
READERS = (  # whose words are no drivers that start
    *("echo", "cat", "cp", "mv", "ln", "ls", "rm", "vi", "vim", "chmod", "touch", "grep", "sed"),
    *("head", "tail", "which", "test", "[", "[[", "git"),
)
GIVE = (
    "give the line that started it in quotes, or its options behind the model file, with --driver "
    "training or optimization, and --ranks N"
)


# How the head of a script asks for ranks, or for nodes and the ranks of each.
HEADS = {
    "ranks": r"^#SBATCH.*?\s(?:-n\s*|--ntasks[= ])(\d+)|^#BSUB\s+-n\s*(\d+)",
    "nodes": r"^#SBATCH.*?\s(?:-N\s*|--nodes[= ])(\d+)|^#PBS.*?(?:select|nodes)=(\d+)",
    "of_each": r"^#SBATCH.*?\s--ntasks-per-node[= ](\d+)|^#PBS.*?(?:mpiprocs|ppn)=(\d+)",
}

# Variables that the batch system sets to what the head asked for.
OF_HEAD = {
    "ranks": ("SLURM_NTASKS", "SLURM_NPROCS", "LSB_DJOB_NUMPROC"),
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "of_each": ("SLURM_NTASKS_PER_NODE",),
}


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
        older = OLDER.search(given)
        if older is not None:
            raise N3LOError(
                f"--from-script: '{path}': {older[0]} is of mpi_learn or mpi_opt, whose options "
                "were others; " + GIVE
            )
        raise N3LOError(
            f"--from-script: '{path}': no line starts {' or '.join(DRIVERS.values())}; {GIVE}"
        )
    if len(found) > 1:
        raise N3LOError(
            f"--from-script: '{path}' starts NNLO {len(found)} times; give the line that you mean, "
            "in quotes"
        )
    return found[0]


def _lines(text: str) -> Iterator[Line]:
    text = re.sub(r"\\\r?\n", " ", text)
    found = {key: re.search(pattern, text, re.M) for key, pattern in HEADS.items()}
    head = {key: int(match[1] or match[2]) for key, match in found.items() if match is not None}
    text = _with_arrays(text)
    assigned = _set_by_head(head)
    for line in text.splitlines():
        for launcher, driver, words in _started(line, assigned):
            yield Line(
                driver=DRIVERS[driver],
                words=words,
                num_ranks=_num_ranks(launcher, head),
                environment=[name for name in ENVIRONMENT if name in assigned],
            )


def _set_by_head(head: Mapping[str, int]) -> dict[str, str]:
    asked = dict(head)
    if "nodes" in head and "of_each" in head:
        asked.setdefault("ranks", head["nodes"] * head["of_each"])
    return {name: str(asked[key]) for key in asked for name in OF_HEAD[key]}


def _with_arrays(text: str) -> str:
    """With the members of arrays, A=(x y), where a script has "${A[@]}"."""
    for match in re.finditer(r"^\s*(\w+)=\(([^)]*)\)", text, re.M):
        members = " ".join(match[2].split()).replace("\\", r"\\")
        text = re.sub(rf'"?\$\{{{match[1]}\[[@*]\]\}}"?', members, text)
    return text


def _started(line: str, assigned: dict[str, str]) -> Iterator[tuple[list[str], str, list[str]]]:
    """Of each command that starts a driver: the words before it, its name, the words behind it."""
    for words in _commands(line, assigned):
        command = list(_assign(words, assigned))
        if not command or command[0] in READERS:
            continue
        for place, word in enumerate(command):
            match = DRIVER.fullmatch(word)
            if match is not None:
                if ":" in command:
                    raise N3LOError(
                        "--from-script: ':' joins several commands to one job; give the line in "
                        "quotes, with one command and the number of all ranks"
                    )
                yield command[:place], match[1], command[place + 1 :]
                break
            if " " in word and any(name in word for name in DRIVERS):  # bash -c "source x; ..."
                for launcher, driver, behind in _started(word, assigned):
                    yield [*command[:place], *launcher], driver, behind
                break


def _assign(words: Sequence[str], assigned: dict[str, str]) -> Iterator[str]:
    """The words of a command but those in front that set variables, which are remembered."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            assigned[name] = value
        elif word != "export" and word not in KEYWORDS:
            yield from words[i:]
            return


def _commands(line: str, assigned: Mapping[str, str]) -> list[list[str]]:
    """The commands of a line, as words without redirections, and with the values of variables."""
    line = re.sub(r"(?<=\s)(?:[012]?>>?|&>|<)\s*(?:&\d|\S+)", " ", line)
    commands, known = [], dict(assigned)
    for place, words in enumerate(_split(line)):  # each knows what those before it set
        commands += _split(_filled(line, known))[place : place + 1]
        list(_assign([_filled(word, known) for word in words], known))
    return commands


def _filled(text: str, assigned: Mapping[str, str]) -> str:
    """With the values of its variables, or their defaults."""
    return re.sub(
        r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))",
        lambda m: assigned.get(m[1] or m[3], m[2] or m[0]),
        text,
    )


def _split(line: str) -> list[list[str]]:
    """The commands of a line, as words."""
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


def _num_ranks(words: Sequence[str], head: Mapping[str, int]) -> int | None:
    """By the words before the driver, such as mpirun -np 7, or else by the head of the script."""
    names = [Path(word).name for word in words]
    at = next((i for i in reversed(range(len(names))) if names[i] in FLAGS), None)
    flags = FLAGS_OF_OTHERS if at is None else FLAGS[names[at]]
    behind = words if at is None else words[at + 1 :]
    ranks = _number(behind, flags.ranks)
    nodes, of_each = _number(behind, flags.nodes), _number(behind, flags.of_each)
    if flags.in_sets:
        return ranks if nodes is None else nodes * (of_each or 1)
    if ranks is not None or at is None:
        return ranks
    if nodes is None and of_each is None and "ranks" in head:
        return head["ranks"]
    nodes, of_each = nodes or head.get("nodes"), of_each or head.get("of_each")
    return head.get("ranks") if nodes is None or of_each is None else nodes * of_each


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
