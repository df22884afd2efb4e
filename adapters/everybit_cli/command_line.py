"""The command line: subcommands, parsing, exit codes.

A subcommand is a frozen dataclass of options, parsed by tyro, and a function of the options, the console to write to, and the command line
for the record.
"""

from __future__ import annotations

import difflib
import inspect
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, get_type_hints

from everybit.base import spelled
from everybit_cli.errors import BAD_OPTION, FAILED, INTERRUPTED, OptionError, is_out_of_memory

if TYPE_CHECKING:
    from rich.console import Console

    from everybit_cli.output import Output, Results

_NEEDED = ("tyro", "rich", "matplotlib", "numpy")


COMMANDS = {
    "compare": "Train one small language model under several policies: loss, lost updates, bytes and time.",
    "plan": "Print the bytes that each rank keeps, needs at its peak and sends, for your model; and which policy fits.",
    "audit": "Show where a training run loses precision, and which policy would keep it.",
}
"""A sentence about each. ``everybit_cli.NAME.command.main`` carries it out; the module is imported when the command is given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``everybit`` with ``arguments``, by default those of the process; without any it prints its help.

    Returns:
        The exit code: 0; 1 if no plan fits, precision is lost, or memory ran out; 2 for a bad option; 130 after Ctrl-C.

    Raises:
        SystemExit: After ``--help``, or where the command line cannot be parsed (code 2).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        return _print_version()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"everybit: the command line needs {', '.join(missing)}: pip install {' '.join(missing)}\n")
        return BAD_OPTION
    name = "everybit"
    try:
        name += f" {arguments[0]}" if arguments and arguments[0] in COMMANDS else ""
        options = parse(arguments or ["--help"])
        results = _main(arguments[0])(options, _console(options), shlex.join(["everybit", *arguments]))
    except OptionError as error:
        return _fail(f"{name}: {error}", BAD_OPTION)
    except KeyboardInterrupt:
        return _fail(f"{name}: interrupted; no file was left half-written", INTERRUPTED)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(f"{name}: out of memory ({' '.join(str(error).split())}); no file was left half-written", FAILED)
    if options.json:
        from everybit_cli.files import as_json

        sys.stdout.write(as_json(results.data))
    return results.exit_code


def parse(arguments: Sequence[str]) -> Output:
    """Return the options of a command line, without running the command.

    Raises:
        OptionError: There is no such command or option; the message names the nearest.
        SystemExit: After ``--help``, or where it cannot be parsed (code 2).
    """
    name, *rest = arguments
    if name in ("-h", "--help"):
        _print_help()
    import tyro

    if name.startswith("--tyro-"):  # completion scripts, for all commands
        tyro.extras.subcommand_cli_from_dict(
            {name: _options(name) for name in COMMANDS}, prog="everybit", args=arguments
        )
    if name not in COMMANDS:
        raise OptionError("command", f"{name}{_meant(name, [*COMMANDS, '--help', '--version'])}", ", ".join(COMMANDS))
    kind = _options(name)
    _require_options(name, kind, rest)
    rest = [_with_dtype(one, before) for one, before in zip(rest, ["", *rest], strict=False)]
    _join_help(kind)
    if {"-h", "--help"} & set(rest):
        sys.stdout.write(_wrapped(inspect.getdoc(kind) or "") + "\n\n")
    # The description is printed above: tyro does not break its lines.
    options: Output = tyro.cli(kind, prog=f"everybit {name}", description="", args=rest)
    return options


_OF_DTYPES = ("--dtype", "--main-params", "--main-grads", "--grad-comm", "--reduce")


def _with_dtype(argument: str, before: str) -> str:
    """An argument with the one name of a dtype, where it or the option before it is one of dtypes: ``bf16`` is ``bfloat16``."""
    option, equals, value = argument.partition("=")
    if equals and option.replace("_", "-") in _OF_DTYPES:
        return f"{option}={spelled(value)}"
    return str(spelled(argument)) if before.replace("_", "-") in _OF_DTYPES else argument


def _main(name: str) -> Callable[[Output, Console, str], Results]:
    """The function of a command."""
    found: Callable[[Output, Console, str], Results] = import_module(f"everybit_cli.{name}.command").main
    return found


def _options(name: str) -> type[Output]:
    """The dataclass that a command's line is parsed into; the docstrings of its fields are the help."""
    found: type[Output] = get_type_hints(_main(name))["options"]
    return found


def _print_help() -> NoReturn:
    """Print the list of commands, without importing their modules, and end.

    Raises:
        SystemExit: The process ends with code 0.
    """
    indent = " " * (max(map(len, COMMANDS)) + 4)
    listed = [
        textwrap.fill(f"  {name:{len(indent) - 4}}  {summary}", _columns(), subsequent_indent=indent)
        for name, summary in COMMANDS.items()
    ]
    more = "everybit COMMAND --help describes a command and its options. everybit --version prints the version."
    parts = [
        "usage: everybit COMMAND [OPTIONS]",
        "Optimizers for PyTorch that account for every bit.",
        "\n".join(listed),
    ]
    sys.stdout.write("\n\n".join([*parts, _wrapped(more)]) + "\n")
    raise SystemExit(0)


def _require_options(name: str, kind: type[Output], arguments: Sequence[str]) -> None:
    known = ["--help"]
    for field in fields(kind):
        option = field.name.replace("_", "-")
        known += [f"--{option}", f"--no-{option}"] if isinstance(field.default, bool) else [f"--{option}"]
    for argument in arguments:
        option = argument.partition("=")[0].replace("_", "-")
        if option.startswith("--") and option not in known:
            said = f"{option}: there is no such option{_meant(option, known)}; everybit {name} --help lists them"
            raise OptionError.saying(said)


def _meant(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _join_help(kind: type[Output]) -> None:
    """Join the lines of the docstrings of options: tyro would keep the line breaks of the source."""
    import docstring_parser

    texts = {
        one.arg_name: " ".join((one.description or "").split())
        for base in reversed(kind.__mro__[:-1])
        for one in docstring_parser.parse_from_object(base).params
    }
    for field in fields(kind):
        field.metadata = MappingProxyType({**field.metadata, "help": texts[field.name]})


def _wrapped(text: str) -> str:
    """Paragraphs, each joined and broken anew at the terminal's width."""
    return "\n\n".join(
        textwrap.fill(" ".join(one.split()), _columns(), break_on_hyphens=False) for one in text.split("\n\n")
    )


def _columns() -> int:
    return max(shutil.get_terminal_size().columns, 20)


def _console(options: Output) -> Console:
    """The console of tables and progress. Standard output is for the results if they are printed as JSON."""
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
