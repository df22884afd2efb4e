"""The ``everybit`` command. Needs the extra ``cli`` (``pip install 'everybit[cli]'``); ``import everybit_torch`` does not load it.

``command_line`` parses and dispatches, each subcommand is a package, and ``errors`` is what they and the dispatcher have in common.
"""

from everybit_cli.command_line import main

__all__ = ["main"]
