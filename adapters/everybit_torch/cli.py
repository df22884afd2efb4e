"""The ``everybit`` command. Needs the extra ``cli`` (``pip install 'everybit[cli]'``); ``import everybit_torch`` does not load it.

A subcommand is a frozen dataclass of options, parsed by tyro, and a function that takes it; :func:`_commands` lists them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

BAD_OPTION = 2
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended

_NEEDED = ("tyro", "rich", "matplotlib", "numpy")


class OptionError(ValueError):
    """An option with a value that cannot be used; commands raise it before they do any work.

    Args:
        option: As it is typed, e.g. ``"--steps"``.
        got: What stood there.
        accepted: What would do.
    """

    def __init__(self, option: str, got: object, accepted: str) -> None:
        super().__init__(f"{option}: got {got}; accepted: {accepted}")


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
    from everybit_torch.compare.command import compare
    from everybit_torch.compare.options import CompareOptions
    from everybit_torch.planning.command import run_plan
    from everybit_torch.planning.options import PlanOptions

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
