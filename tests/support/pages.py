"""Runs the code blocks of a page of the documentation, one after the other, as a reader would who pastes them.

===================================================  ============================================================================
a block of                                           what is done
===================================================  ============================================================================
```` ```python ````                                  run in one module for the whole page
```` ```diff ````, on pages that say so              run without the lines that are taken away
```` ```python ```` below a line                     parsed; the reason stands in the comment. What takes long is run by
``<!-- not run: ... -->``, ``<!-- slow: ... -->``    ``make exhaustive``
a block with ``title="name"``, of any language       written to the file of that name in the working folder
```` ``` ```` or ```` ```sh ````                     each ``everybit ...`` is parsed, and run if the page is given something to make
                                                     it smaller; each ``torchrun ...`` of a file of the page is run, and others have to
                                                     exist: tests/sharded runs them. Other lines are left alone
anything else (``text``, ``toml``, a ``diff``)       left alone
===================================================  ============================================================================
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import everybit_cli as cli
from everybit_cli.command_line import parse
from tests.support.ports import free_port
from tests.support.ranks import run

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>not run|slow): [^\n]* -->\n)?```(?P<info>[^\n`]*)\n(?P<source>.*?)^```[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_SHELL = ("", "sh", "bash")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: Path below the root of the repository.
        line: Of its first line of code, counted from 1.
        language: What its fence says; empty if nothing.
        title: The file that it is, if it is one.
        source: Its code.
        mark: What the page says of running it: ``not run``, ``slow``, or nothing.
    """

    page: str
    line: int
    language: str
    title: str | None
    source: str
    mark: str | None = None

    @property
    def is_program(self) -> bool:
        """Whether it is run as Python."""
        return self.language == "python" and self.title is None

    @property
    def commands(self) -> list[list[str]]:
        """The command lines of ``everybit`` and ``torchrun`` in a shell block; a line that ends in a backslash goes on."""
        if self.language not in _SHELL or self.title is not None:
            return []
        lines = self.source.replace("\\\n", " ").splitlines()
        found = [shlex.split(line, comments=True) for line in lines if line.startswith(("everybit ", "torchrun "))]
        return [words for words in found if words]


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]*)"', rest)
        line = text.count("\n", 0, match.start("source")) + 1
        found.append(Block(page, line, language, title and title[1], match["source"], match["mark"]))
    return found


def pages_with_blocks() -> list[str]:
    """Every page of the documentation that has a block of Python or of commands, decision records and the changelog left out."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return [
        name
        for name in names
        if not name.startswith("docs/decisions/")
        and any(b.language in ("python", "diff") or b.commands for b in blocks(name))
    ]


def launch_in_pool(words: Sequence[str], folder: Path) -> None:
    """Do what ``torchrun`` does with these arguments, in processes that have imported torch already."""
    size, script, arguments = _launched(words)
    run(size, _as_main, str(folder), script, arguments, free_port())


def launch_by_torchrun(words: Sequence[str], folder: Path) -> None:
    """Run ``torchrun`` itself.

    Raises:
        AssertionError: It failed; the message is what it wrote.
    """
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1",
                          "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


def _launched(words: Sequence[str]) -> tuple[int, str, list[str]]:
    """The number of processes, the script and its arguments."""
    options = list(words[: next(index for index, word in enumerate(words) if word.endswith(".py"))])
    script, *arguments = words[len(options) :]
    sizes = list(_values(options, "--nproc-per-node"))
    assert len(sizes) == 1, f"torchrun {shlex.join(words)}: got {sizes}; accepted is one --nproc-per-node."
    return int(sizes[0]), script, arguments


def _values(words: Sequence[str], option: str) -> Iterator[str]:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            yield after
        elif word.startswith(option + "="):
            yield word.partition("=")[2]


def _as_main(folder: str, script: str, arguments: list[str], port: int) -> None:
    """Run a script as ``torchrun`` would on this rank: it makes the process group itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    environment = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    before = os.getcwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(sys, "argv", [script, *arguments]),
            mock.patch.object(sys, "path", [folder, *sys.path]),
        ):
            runpy.run_path(str(Path(folder) / script), run_name="__main__")
    finally:
        os.chdir(before)
        _forget_modules_of(folder)


def _forget_modules_of(folder: str) -> None:
    """Drop what was imported from the files of a page: another page may have one of the same name."""
    for name, found in list(sys.modules.items()):
        if folder in (getattr(found, "__file__", None) or ""):
            del sys.modules[name]


@dataclass(slots=True)
class Page:
    """How a page is run.

    Attributes:
        setup: Code that stands for what a reader has already; none for pages that say all of it. By the number of the block of Python that
            it comes before, counted from 1.
        parsed: Numbers of blocks of Python that are parsed only, because they need a device or a package that the tests do not have.
        smaller: Words of commands, and what is written in their place. None: ``everybit`` commands are parsed only.
        check: Looks at what came of it: the page's names, what was printed, the working folder.
        first: A page whose blocks are run before, as its own text says.
        diffs: Whether differences are programs.
        launcher: Does what ``torchrun`` does with some arguments, in a folder.
        group: Whether the reader is in a script that ``torchrun`` started: there is a process group, of one rank.
    """

    setup: Mapping[int, str] = field(default_factory=dict)
    parsed: Collection[int] = ()
    smaller: Mapping[str, str] | None = None
    check: Callable[[dict[str, Any], str, Path], None] | None = None
    first: str | None = None
    diffs: bool = False
    launcher: Callable[[Sequence[str], Path], None] = launch_in_pool
    group: bool = False


def run_page(page: str, how: Page, folder: Path, *, slow: bool = False) -> dict[str, Any]:
    """Run the blocks of a page in ``folder``, which is the working directory; return the names that they made.

    With ``slow`` also those that the page calls slow.

    Raises:
        AssertionError: A command whose exit code says that an option cannot be used, or a rank that failed.
        Exception: What a block raised, at its line of the page.
    """
    module = ModuleType(re.sub(r"\W", "_", page))
    module.__file__ = page
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(folder))
    if how.group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for block in blocks(how.first) if how.first else []:
                _do(block, how, folder, module, run=block.mark is None)
            number = 0
            for block in blocks(page):
                number += block.is_program
                if block.is_program and number in how.setup:
                    _execute(how.setup[number], f"set-up of {page}, block {number}", 1, module)
                run = block.mark is None or (slow and block.mark == "slow")
                _do(block, how, folder, module, run=run and number not in how.parsed)
            unused = sorted({*how.setup, *how.parsed} - set(range(1, number + 1)))
            assert not unused, f"{page}: has {number} blocks of Python; got set-up for {unused}."
    finally:
        sys.path.remove(str(folder))
        _forget_modules_of(str(folder))
        if dist.is_initialized():  # a block may have made it
            dist.destroy_process_group()
    return vars(module)


def _do(block: Block, how: Page, folder: Path, module: ModuleType, *, run: bool) -> None:
    if block.title is not None:
        (folder / block.title).write_text(block.source, encoding="utf-8")
    elif block.is_program:
        _execute(block.source, block.page, block.line, module, run=run)
    elif block.language == "diff" and how.diffs and run:
        _execute(without_what_is_taken_away(block.source), block.page, block.line, module)
    for words in block.commands:
        if words[0] == "torchrun":
            script = _launched(words[1:])[1]
            if (folder / script).is_file():
                how.launcher(_smaller(words[1:], how.smaller or {}), folder)
            else:
                assert (ROOT / script).is_file(), f"{block.page}, line {block.line}: there is no {script}."
        else:
            _command(words[1:], f"{block.page}, line {block.line}", how.smaller)


def without_what_is_taken_away(difference: str) -> str:
    """The program that a difference leads to; lines that are taken away are left empty, so that lines keep their numbers."""
    return "".join("\n" if line.startswith("-") else f"{line[1:]}\n" for line in difference.splitlines())


def _execute(source: str, page: str, line: int, module: ModuleType, *, run: bool = True) -> None:
    # Lines are counted as in the page, for tracebacks.
    code = compile("\n" * (line - 1) + source, page, "exec", dont_inherit=True)
    if run:
        exec(code, vars(module))


def _command(words: list[str], where: str, smaller: Mapping[str, str] | None) -> None:
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parse(words)
    except SystemExit as error:
        if error.code != 0:
            raise AssertionError(f"{where}: {said.getvalue()}") from None
    if smaller is not None:
        run_as = _smaller(words, smaller)
        code = cli.main(run_as)
        assert code in (0, 1), f"{where}: everybit {shlex.join(run_as)} ended with {code}"


def _smaller(words: list[str], replacements: Mapping[str, str]) -> list[str]:
    line = shlex.join(words)
    for long, short in replacements.items():
        line = line.replace(long, short)
    return shlex.split(line)
