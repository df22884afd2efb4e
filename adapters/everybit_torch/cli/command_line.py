"""The command line: subcommands, parsing, exit codes.

A subcommand is a frozen dataclass of options, parsed by tyro, and a function that takes it; :func:`_commands` lists them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from everybit_torch.cli.errors import BAD_OPTION, INTERRUPTED, OptionError

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

_NEEDED = ("tyro", "rich", "matplotlib", "numpy")


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """A subcommand.

    Args:
        options: What its command line is parsed into; the docstrings of the fields are the help.
        run: Does it. Takes the options, the console to write to, and the command line for the record. Raises OptionError.
    """

    options: type[T]
    run: Callable[[T, Console, str], None]


def _commands() -> dict[str, Command[Any]]:
    from everybit_torch.cli.compare.command import compare
    from everybit_torch.cli.compare.options import CompareOptions
    from everybit_torch.cli.plan.command import run_plan
    from everybit_torch.cli.plan.options import PlanOptions

    return {"compare": Command(CompareOptions, compare), "plan": Command(PlanOptions, run_plan)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``everybit`` with ``arguments``, by default those of the process.

    Returns:
        The exit code: 0, 2 for a bad option, 130 after Ctrl-C.

    Raises:
        SystemExit: After ``--help``, or where the command line cannot be parsed (code 2).
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"everybit: the command line needs {', '.join(missing)}: pip install 'everybit[cli]'\n")
        return BAD_OPTION
    import tyro
    from rich.console import Console

    arguments = sys.argv[1:] if arguments is None else list(arguments)
    commands = _commands()
    options = tyro.extras.subcommand_cli_from_dict(
        {name: command.options for name, command in commands.items()},
        prog="everybit",
        description="Optimizers for PyTorch that account for every bit.",
        args=arguments,
    )
    name, command = next((name, command) for name, command in commands.items() if type(options) is command.options)
    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        command.run(options, Console(), shlex.join(["everybit", *arguments]))
    except OptionError as error:
        errors.print(f"everybit {name}: {error}")
        return BAD_OPTION
    except KeyboardInterrupt:
        errors.print(f"everybit {name}: interrupted; no file was left half-written")
        return INTERRUPTED
    return 0
