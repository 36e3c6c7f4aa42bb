"""Write docs/reference/cli.md from the parsers: python docs/reference/write_cli.py"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from workflow import cli

PAGE = Path(__file__).with_name("cli.md")
HEAD = """\
# The command

`n3lo COMMAND ...`, or in a checkout `python run_workflow.py COMMAND ...`; without a command it is \
`run`. `n3lo COMMAND --help` says the same as this page, which is written from it.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(name, parser) for name, parser in commands(cli._parser()))


def commands(
    parser: argparse.ArgumentParser, of: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command with its parser; `sites` is followed by `sites list`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield of + name, below
                yield from commands(below, f"{of}{name} ")


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Of one command, in the order in which they are declared."""
    left_out = (argparse._SubParsersAction, argparse._HelpAction)
    return [action for action in parser._actions if not isinstance(action, left_out)]


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    rows = "".join(f"| {_names(action)} | {_help(action)} |\n" for action in arguments(parser))
    table = f"\n| argument | meaning |\n|---|---|\n{rows}" if rows else ""
    summary = parser.description or ""
    return f"\n## {name}\n\n{summary[:1].upper()}{summary[1:]}.\n{table}"


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%").replace("|", "\\|")


def _names(action: argparse.Action) -> str:
    """As it is typed: `--lines N`, `STUDY`."""
    value = action.metavar or (action.choices and "/".join(map(str, action.choices))) or ""
    words = value if isinstance(value, tuple) else (str(value) or action.dest.upper(),)
    if not action.option_strings:
        return f"`{' '.join(words)}`"
    takes_value = action.nargs != 0
    return f"`{' '.join([action.option_strings[-1], *(words if takes_value else ())])}`"


if __name__ == "__main__":
    PAGE.write_text(page())
