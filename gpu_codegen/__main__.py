"""``python -m gpu_codegen``: compile every step for GPUs that are not there, and say what is wrong with the code."""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from gpu_codegen.cases import cases
from gpu_codegen.checking import Result, check, different_bits, quietly
from gpu_codegen.exceptions import EXCEPTIONS
from gpu_codegen.fake_gpu import UnsupportedError, require_torch, require_triton
from gpu_codegen.report import table, write_into


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all laws hold but of exceptions, 1 if one does not, 2 if nothing can be compiled here."""
    parser = argparse.ArgumentParser(prog="python -m gpu_codegen", description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases, or patterns such as 'adamw under *'; default: all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its markers")
    given = parser.parse_args(arguments)
    try:
        require_torch()
        require_triton()
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        names = chosen(given.cases)
    except ValueError as error:
        parser.error(str(error))
    started = time.perf_counter()
    results = run(names, given.processes)
    excepted = [one for one in results if one.optimizer in EXCEPTIONS]
    held = [one for one in results if one.optimizer not in EXCEPTIONS]
    data = [one.as_data() for one in held]
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(_with_versions(data), indent=1) + "\n", encoding="utf-8")
    if given.page is not None:
        write_into(given.page, table([one for one in data if one["optimizer"] == "adamw"]))
    wrong = [f"{one.name}: {said}" for one in held for said in one.broken]
    wrong += [
        f"{one.name}: all laws hold, and exceptions.py says that it {EXCEPTIONS[one.optimizer]}."
        for one in excepted
        if not one.broken
    ]
    print(
        *(f"{one.name}: an exception, {EXCEPTIONS[one.optimizer]}." for one in excepted if one.broken), *wrong, sep="\n"
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(results)} steps, {len(excepted)} exceptions, {len(wrong)} broken laws, {time.perf_counter() - started:.0f} s,"
        f" {used.ru_utime + used.ru_stime:.0f} s of processors."
    )
    return 1 if wrong else 0


def chosen(patterns: Sequence[str]) -> list[str]:
    """The names of the cases that fit one of the patterns; of all, if there are none.

    Raises:
        ValueError: A pattern that fits none.
    """
    names = [case.name for case in cases()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"cases: got {pattern}; accepted are {', '.join(names)}, and patterns such as 'adamw under *'."
            )
    return [name for name in names if not patterns or any(fnmatch.fnmatchcase(name, one) for one in patterns)]


def run(names: list[str], processes: int) -> list[Result]:
    """Check cases in several processes. Their bits are compared when all is compiled, since the interpreter changes Triton."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # this has processes of its own
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=quietly) as pool:
        results = []
        for number, result in enumerate(pool.map(check, names), start=1):
            print(f"{number}/{len(names)} {result.name}: {result.launches} launches", flush=True)
            results.append(result)
        whole = [one for one in results if one.compiled is not None]
        said = pool.map(different_bits, [one.name for one in whole], [one.compiled for one in whole])
        for result, different in zip(whole, said, strict=True):
            result.broken += different
    return results


def _with_versions(results: list[dict[str, object]]) -> dict[str, object]:
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__, "results": results}


if __name__ == "__main__":
    sys.exit(main())
