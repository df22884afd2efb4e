"""The command line: subcommands, parsing, exit codes.

A subcommand is a frozen dataclass of options, parsed by tyro, and a function that takes it; :func:`_commands` lists them.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from everybit_torch.cli.errors import BAD_OPTION, FAILED, INTERRUPTED, OptionError, is_out_of_memory

if TYPE_CHECKING:
    from rich.console import Console

    from everybit_torch.cli.output import Output, Results

    T = TypeVar("T", bound=Output)
else:
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
    run: Callable[[T, Console, str], Results]


def _commands() -> dict[str, Command[Any]]:
    from everybit_torch.cli.advise.command import AdviseOptions, advise
    from everybit_torch.cli.audit.command import AuditOptions, audit
    from everybit_torch.cli.bench.command import bench
    from everybit_torch.cli.bench.options import BenchOptions
    from everybit_torch.cli.compare.command import compare
    from everybit_torch.cli.compare.options import CompareOptions
    from everybit_torch.cli.plan.command import run_plan
    from everybit_torch.cli.plan.options import PlanOptions
    from everybit_torch.cli.sweep.command import run_sweep
    from everybit_torch.cli.sweep.options import SweepOptions

    return {
        "compare": Command(CompareOptions, compare),
        "sweep": Command(SweepOptions, run_sweep),
        "plan": Command(PlanOptions, run_plan),
        "advise": Command(AdviseOptions, advise),
        "bench": Command(BenchOptions, bench),
        "audit": Command(AuditOptions, audit),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``everybit`` with ``arguments``, by default those of the process; without any it prints its help.

    Returns:
        The exit code: 0; 1 if nothing fits, precision is lost, or memory ran out; 2 for a bad option; 130 after Ctrl-C.

    Raises:
        SystemExit: After ``--help``, or where the command line cannot be parsed (code 2).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        return _print_version()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"everybit: the command line needs {', '.join(missing)}: pip install 'everybit[cli]'\n")
        return BAD_OPTION
    name = "everybit"
    try:
        options, command = parse(arguments or ["--help"])
        name = f"everybit {arguments[0]}"
        results = command.run(options, _console(options), shlex.join(["everybit", *arguments]))
    except OptionError as error:
        return _fail(f"{name}: {error}", BAD_OPTION)
    except KeyboardInterrupt:
        return _fail(f"{name}: interrupted; no file was left half-written", INTERRUPTED)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(f"{name}: out of memory ({' '.join(str(error).split())}); no file was left half-written", FAILED)
    if options.json:
        from everybit_torch.cli.files import as_json

        sys.stdout.write(as_json(results.data))
    return results.exit_code


def parse(arguments: Sequence[str]) -> tuple[Output, Command[Any]]:
    """Parse a command line, and do nothing yet.

    Returns:
        The options, and the command that takes them.

    Raises:
        OptionError: There is no such command; the message names the nearest.
        SystemExit: After ``--help``, or where it cannot be parsed (code 2).
    """
    import tyro

    commands = _commands()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        close = difflib.get_close_matches(arguments[0], commands, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise OptionError("command", f"{arguments[0]}{meant}", ", ".join(commands))
    options: Output = tyro.extras.subcommand_cli_from_dict(
        {name: command.options for name, command in commands.items()},
        prog="everybit",
        description="Optimizers for PyTorch that account for every bit. --version prints the version.",
        args=arguments,
    )
    return options, next(command for command in commands.values() if type(options) is command.options)


def _console(options: Output) -> Console:
    """Where tables and progress go: standard output belongs to the results if they are asked for as JSON."""
    from rich.console import Console

    return Console(stderr=options.json, quiet=options.quiet)


def _fail(message: str, code: int) -> int:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(message)
    return code


def _print_version() -> int:
    import platform

    import torch

    import everybit as eb

    sys.stdout.write(f"everybit {eb.__version__} (torch {torch.__version__}, Python {platform.python_version()})\n")
    return 0
