"""Data on the node's disk: copied once, whole, and again only when it has changed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from apps import staging
from apps.contract import N3LOError
from apps.staging import stage

PROGRAM = Path(__file__).with_name("staging_ranks.py")
ROOT = Path(__file__).resolve().parent.parent

# Copies like cp, after a line in a log; waits in the middle as long as a file is there.
COPIER = """
import os, sys, time
log, wait, source, target = sys.argv[1:]
with open(log, "a") as file:
    file.write(f"{os.getpid()}\\n")
content = open(source, "rb").read()
with open(target, "wb") as file:
    file.write(content[:100])
    file.flush()
    while os.path.exists(wait):
        time.sleep(0.01)
    file.write(content[100:])
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch) -> None:
    for name in ("DATA_CACHE", "DATA_COPY_COMMAND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _end_as_a_process_does() -> Iterator[None]:
    yield
    release()


def release() -> None:
    """What the end of this process would do."""
    for number in staging._held.values():
        os.close(number)
    staging._held.clear()


def source_of(folder: Path, name: str = "events.h5", size: int = 1000) -> Path:
    (folder / "shared").mkdir(exist_ok=True)
    path = folder / "shared" / name
    path.write_bytes(os.urandom(size))
    return path


def copier(folder: Path) -> str:
    return shlex.join([sys.executable, "-c", COPIER, f"{folder}/log", f"{folder}/wait", "{}", "{}"])


def copies_made(folder: Path) -> list[int]:
    """The process numbers of the copiers that have started."""
    log = folder / "log"
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


def until(condition: Callable[[], object]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("this should have happened within 30 seconds")


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that stages files once the file `go` is there."""
    processes = []

    def run(*files: object, command: str = "") -> subprocess.Popen[str]:
        words = [sys.executable, PROGRAM, tmp_path / "go", tmp_path / "cache", command, *files]
        process = subprocess.Popen(
            list(map(str, words)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def hidden(folder: Path) -> list[str]:
    """What is not whole yet."""
    return [each.name for each in (folder / "cache").glob(".*.part")]


def test_without_a_setting_files_stay_where_they_are():
    assert stage(["a.h5", "/b/c.h5"]) == [Path("a.h5"), Path("/b/c.h5")]


def test_a_copy_has_the_content_and_the_ending_of_its_source(tmp_path):
    files = [source_of(tmp_path, name) for name in ("a.h5", "b.h5")]
    copies = stage([str(file) for file in files], str(tmp_path / "cache"))
    assert [copy.read_bytes() for copy in copies] == [file.read_bytes() for file in files]
    assert all(copy.parent == tmp_path / "cache" and copy.suffix == ".h5" for copy in copies)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_files_of_the_same_name_are_kept_apart(tmp_path):
    first = source_of(tmp_path)
    (tmp_path / "other").mkdir()
    second = source_of(tmp_path / "other")
    copies = stage([str(first), str(second)], str(tmp_path / "cache"))
    assert [each.read_bytes() for each in copies] == [first.read_bytes(), second.read_bytes()]


def test_settings_can_come_from_the_environment(tmp_path, monkeypatch):
    source = source_of(tmp_path)
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    monkeypatch.setenv("DATA_CACHE", "${NODE_DISK}/from environment")
    monkeypatch.setenv("DATA_COPY_COMMAND", copier(tmp_path))
    [copy] = stage([str(source)])
    assert copy.parent == tmp_path / "from environment"
    assert copy.read_bytes() == source.read_bytes()
    assert len(copies_made(tmp_path)) == 1
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    [copy] = stage([str(source)], "~/given", "cp {} {}")
    assert copy.parent == tmp_path / "home/given"
    assert len(copies_made(tmp_path)) == 1


def test_four_processes_at_once_copy_each_file_once(tmp_path, start):
    files = [source_of(tmp_path, name, size=100_000) for name in ("a.h5", "b.h5")]
    processes = [start(*files, command=copier(tmp_path)) for _ in range(4)]
    (tmp_path / "go").touch()
    found = [[process.stdout.readline().strip() for _ in files] for process in processes]
    assert found[0] == found[1] == found[2] == found[3]
    for path, file in zip(found[0], files, strict=True):
        assert Path(path).read_bytes() == file.read_bytes()
    assert len(copies_made(tmp_path)) == len(files)


def test_a_copy_that_was_killed_halfway_is_made_again(tmp_path, start):
    source = source_of(tmp_path)
    (tmp_path / "go").touch()
    (tmp_path / "wait").touch()
    first = start(source, command=copier(tmp_path))
    until(lambda: hidden(tmp_path))
    waiting = start(source, command=copier(tmp_path))
    first.kill()
    first.wait()
    until(lambda: len(copies_made(tmp_path)) == 2)
    (tmp_path / "wait").unlink()
    [copy] = [Path(waiting.stdout.readline().strip())]
    assert copy.read_bytes() == source.read_bytes()
    assert hidden(tmp_path) == []


def test_killed_with_its_command_it_leaves_nothing_that_counts(tmp_path, start):
    source = source_of(tmp_path)
    (tmp_path / "go").touch()
    (tmp_path / "wait").touch()
    process = start(source, command=copier(tmp_path))
    until(lambda: hidden(tmp_path))
    process.kill()
    os.kill(copies_made(tmp_path)[0], 9)
    process.wait()
    assert len(hidden(tmp_path)) == 1
    [copy] = stage([str(source)], str(tmp_path / "cache"))
    assert copy.read_bytes() == source.read_bytes()
    assert hidden(tmp_path) == []


def test_only_a_changed_source_is_copied_again(tmp_path):
    source, settings = source_of(tmp_path), (str(tmp_path / "cache"), copier(tmp_path))
    stage([str(source)], *settings)
    stage([str(source)], *settings)
    assert len(copies_made(tmp_path)) == 1
    source.write_bytes(b"larger" * 1000)
    [copy] = stage([str(source)], *settings)
    assert copy.read_bytes() == source.read_bytes()
    old = source.stat()
    source.write_bytes(b"LARGER" * 1000)
    os.utime(source, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    [copy] = stage([str(source)], *settings)
    assert copy.read_bytes() == source.read_bytes()
    assert len(copies_made(tmp_path)) == 3


def test_a_source_that_changes_while_others_use_its_copy_is_not_waited_for(tmp_path, start):
    source = source_of(tmp_path)
    (tmp_path / "go").touch()
    user = start(source)
    before = source.read_bytes()
    with open(user.stdout.readline().strip(), "rb") as opened:
        source.write_bytes(b"new" * 100)
        [copy] = stage([str(source)], str(tmp_path / "cache"))
        assert copy.read_bytes() == b"new" * 100
        assert opened.read() == before


Usage = namedtuple("Usage", "total used free")


def limit(monkeypatch, cache: Path, num_bytes: int) -> None:
    """A disk of which the copies and what may never be used up fill so many bytes."""

    def usage(_: Path) -> Usage:
        used = sum(each.stat().st_size for each in cache.glob("n3lo-*"))
        total = 10**12
        return Usage(total, total - num_bytes + used, num_bytes - used + staging.SPARE_BYTES)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_without_space_the_source_itself_is_used_with_a_warning(tmp_path, monkeypatch, capsys):
    source = source_of(tmp_path, size=1000)
    limit(monkeypatch, tmp_path / "cache", 999)
    assert stage([str(source)], str(tmp_path / "cache")) == [source]
    [line] = capsys.readouterr().err.splitlines()
    assert f"'{source}' is read where it is: only 1.0 GB are free in" in line
    assert hidden(tmp_path) == []


def test_short_space_removes_what_nobody_uses_the_oldest_first(
    tmp_path, monkeypatch, start, capsys
):
    cache = tmp_path / "cache"
    names = ["held", "old", "older", "new"]
    sources = {name: source_of(tmp_path, name, size=1000) for name in names}
    copies = {name: stage([str(file)], str(cache))[0] for name, file in sources.items()}
    release()
    for name, seconds in (("held", 1), ("older", 2), ("old", 3), ("new", 4)):
        os.utime(copies[name], (seconds, copies[name].stat().st_mtime))
    (tmp_path / "go").touch()
    user = start(sources["held"])
    assert user.stdout.readline().strip() == str(copies["held"])
    os.utime(copies["held"], ns=(0, copies["held"].stat().st_mtime_ns))
    limit(monkeypatch, cache, 4500)

    [copy] = stage([str(source_of(tmp_path, "another", size=2500))], str(cache))
    assert {name for name, each in copies.items() if each.exists()} == {"held", "new"}
    assert copy.stat().st_size == 2500

    too_large = source_of(tmp_path, "too large", size=3000)
    assert stage([str(too_large)], str(cache)) == [too_large]
    assert "is read where it is: only" in capsys.readouterr().err
    assert copies["held"].exists()
    assert copy.exists()  # held by this process

    user.communicate()
    release()
    assert stage([str(too_large)], str(cache)) != [too_large]
    assert not copies["held"].exists()


def test_short_space_removes_what_a_killed_process_has_left(tmp_path, monkeypatch, start):
    (tmp_path / "go").touch()
    (tmp_path / "wait").touch()
    process = start(source_of(tmp_path), command=copier(tmp_path))
    until(lambda: hidden(tmp_path))
    limit(monkeypatch, tmp_path / "cache", 10)
    another = str(source_of(tmp_path, "another"))
    stage([another], str(tmp_path / "cache"))
    assert len(hidden(tmp_path)) == 1  # it is still being written
    process.kill()
    process.wait()
    stage([another], str(tmp_path / "cache"))
    assert hidden(tmp_path) == []
    (tmp_path / "wait").unlink()


def test_files_of_others_in_the_cache_are_never_removed(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "n3lo-thesis.tex").write_text("...")
    limit(monkeypatch, cache, 10)
    stage([str(source_of(tmp_path))], str(cache))
    assert (cache / "n3lo-thesis.tex").exists()


def test_a_failing_command_uses_the_source_and_shows_its_last_line(tmp_path, capsys):
    source = source_of(tmp_path)
    command = "sh -c 'echo first >&2; echo no ticket >&2; exit 3; : {} {}'"
    assert stage([str(source)], str(tmp_path / "cache"), command) == [source]
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(": no ticket")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("sh -c 'echo first >&2; echo no ticket >&2; exit 3; : {} {}'", ": no ticket$"),
        ("sh -c 'exit 3; : {} {}'", ": exit status 3$"),
        ("sh -c 'touch $1' copy {} {}", "No such file or directory$"),
        ("sh -c 'touch $2' copy {} {}", "the copy has 0 bytes$"),
        ("no-such-command {} {}", "'no-such-command': No such file or directory$"),
    ],
)
def test_a_remote_file_that_cannot_be_had_is_an_error(tmp_path, monkeypatch, command, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(N3LOError, match=f"^data.files: 'x://a/b.h5' cannot be copied: .*{reason}"):
        stage(["x://a/b.h5"], str(tmp_path / "cache"), command)
    assert hidden(tmp_path) == []


def test_remote_files_are_fetched_once_for_each_command(tmp_path):
    for store in ("one", "two"):
        (tmp_path / store).mkdir()
        (tmp_path / store / "events.h5").write_text(store)
    cache = str(tmp_path / "cache")
    commands = [f"cp {tmp_path}/{store}/{{}} {{}}" for store in ("one", "two")]
    copies = [stage(["events.h5"], cache, command)[0] for command in commands]
    assert [copy.read_text() for copy in copies] == ["one", "two"]
    (tmp_path / "one/events.h5").unlink()
    assert stage(["events.h5"], cache, commands[0]) == copies[:1]


def test_a_copy_of_another_size_than_its_source_is_refused(tmp_path, capsys):
    source = source_of(tmp_path)
    command = ["sh", "-c", 'head -c 10 "$1" > "$2"', "copy", "{}", "{}"]
    assert stage([str(source)], str(tmp_path / "cache"), command) == [source]
    assert "the copy has 10 bytes" in capsys.readouterr().err
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("name", ["two words.h5", "'\".h5", "a; touch broken; b.h5", "$(x){}*[1]"])
@pytest.mark.parametrize("command", [None, "cp {} {}", ["cp", "{}", "{}"]])
def test_no_shell_reads_the_names_of_files(tmp_path, monkeypatch, name, command):
    monkeypatch.chdir(tmp_path)
    source = source_of(tmp_path, name)
    [copy] = stage([f"shared/{name}"], f"{tmp_path}/a cache; 'x", command)
    assert copy != source
    assert copy.read_bytes() == source.read_bytes()
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize("command", ["cp {}", "cp {} {} {}", "cp a b"])
def test_a_command_needs_a_source_and_a_target(tmp_path, monkeypatch, command):
    with pytest.raises(N3LOError, match=r"^data.copy_command: 'cp .* needs {} twice"):
        stage(["a.h5"], str(tmp_path), command)
    monkeypatch.setenv("DATA_COPY_COMMAND", command)
    with pytest.raises(N3LOError, match=r"^the variable DATA_COPY_COMMAND: 'cp .* needs {} twice"):
        stage(["a.h5"], str(tmp_path))


def test_a_wrong_folder_of_the_environment_is_named_by_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DATA_CACHE", str(tmp_path / "file"))
    with pytest.raises(N3LOError, match=r"^the variable DATA_CACHE: '.*file' cannot be made: File"):
        stage(["a.h5"])


def test_wrong_settings_are_named(tmp_path):
    with pytest.raises(N3LOError, match=r"data.cache: '\$NOWHERE/x': the variable NOWHERE is not"):
        stage(["a.h5"], "$NOWHERE/x")
    with pytest.raises(N3LOError, match=r"data.copy_command: .* a quote is not closed"):
        stage(["a.h5"], str(tmp_path), "cp '{} {}")
    (tmp_path / "file").touch()
    with pytest.raises(N3LOError, match=r"data.cache: '.*file' cannot be made: File exists"):
        stage(["a.h5"], str(tmp_path / "file"))
    with pytest.raises(
        N3LOError, match=r"data.files: 'root://a' does not exist; set data.copy_com"
    ):
        stage(["root://a"], str(tmp_path))
