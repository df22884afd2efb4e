"""The ``everybit`` command. Needs the extra ``cli`` (in a clone ``pip install '.[cli]'``); ``import everybit_torch`` does not load it.

``command_line`` parses and dispatches, each subcommand is a package, and ``errors`` has the exit codes and the error of an option.
"""

from everybit_cli.command_line import main

__all__ = ["main"]
