"""The table shows every number in 80 columns, whole."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from everybit_cli.compare.progress import Bars
from everybit_cli.compare.report import sheet, throughput
from everybit_cli.compare.results import Record, Summary, summarize
from everybit_cli.output import show

MakeRecord = Callable[..., Record]


def rendered(rows: list[Summary], seeds: int, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(sheet(rows, reference="FP32", seeds=seeds, compiled=False), console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_widest_rows_fit_a_terminal(make_record: MakeRecord) -> None:
    records = [
        make_record(name, seed, final=2.0 + seed + gap, seconds=0.1)
        for seed, gap in ((0, 0.0749), (1, 0.0813))
        for name, gap in (("FP32", 0.0), ("ANYPRECISION", gap))
    ]
    text = rendered(summarize(records, "FP32"), seeds=2)
    row = next(line for line in text.splitlines() if "ANYPRECISION" in line)
    assert " ".join(row.split()) == "ANYPRECISION 2.5781 +0.0781 ±0.0045 25.0 0.750 10.00 10.00 100.0"
    assert "…" not in text
    assert "2 seeds" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_a_long_name_is_broken_before_a_number_is(make_record: MakeRecord) -> None:
    name = "kahan_with_a_float16_residual"
    records = [make_record(policy, seed, seconds=0.1) for seed in (0, 1) for policy in ("FP32", name)]
    text = rendered(summarize(records, "FP32"), seeds=2)
    assert "…" not in text
    assert name in "".join(line.split(" ")[0] for line in text.splitlines())


def test_a_narrow_terminal_gets_every_number_below_the_policys_name(make_record: MakeRecord) -> None:
    rows = summarize([make_record("FP32", final=2.0), make_record("LEAN_BF16", final=2.25)], "FP32")
    lines = rendered(rows, seeds=1, width=40).splitlines()
    assert max(map(len, lines)) <= 40
    block = lines[lines.index("LEAN_BF16") + 1 :]
    found = {" ".join(line.split()[:-1]): line.split()[-1] for line in block[:7]}
    assert found == {
        "loss": "2.2500", "vs FP32": "+0.2500", "lost %": "25.0", "EDQ": "0.750", "bytes measured": "10.00",
        "bytes predicted": "10.00", "step ms": "1.00",
    }  # fmt: skip


def test_the_caption_says_whether_the_step_is_compiled_and_why_it_has_no_time(make_record: MakeRecord) -> None:
    rows = summarize([make_record("FP32")], "FP32")
    assert "not compiled (--compile compiles it)." in sheet(rows, reference="FP32", seeds=1, compiled=False).caption
    assert sheet(rows, reference="FP32", seeds=1, compiled=True).caption.endswith("optimizer.step(), compiled.")
    untimed = [replace(row, optimizer_milliseconds=None) for row in rows]
    assert "too few steps" in sheet(untimed, reference="FP32", seeds=1, compiled=False).caption


def test_no_difference_has_no_sign_and_no_time_no_number(make_record: MakeRecord) -> None:
    rows = summarize([make_record("FP32", final=2.0), make_record("LEAN_BF16", final=2.0 - 1e-9)], "FP32")
    text = rendered([rows[0], replace(rows[1], optimizer_milliseconds=None)], seeds=1)
    row = next(line for line in text.splitlines() if "LEAN_BF16" in line)
    assert row.split()[2] == "+0.0000"
    assert row.split()[-1] == "-"
    assert "seeds" not in text


def test_throughput_is_bytes_by_time(make_record: MakeRecord) -> None:
    rows = summarize([make_record("FP32", seconds=0.25e-3), make_record("AMP")], "FP32")
    # Whole steps take four times as long as the optimizer's here: 1 ms and 4 ms.
    assert throughput(rows, 1024) == "FP32 1,024,000, AMP 256,000"
    assert throughput([replace(rows[0], training_milliseconds=None)], 1024) == ""


def test_a_log_gets_a_line_once_all_policies_are_validated() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    with Bars(console, ["FP32", "LEAN_BF16"], 4) as bars:
        for policy, loss in (("FP32", 2.5), ("LEAN_BF16", 2.25)):
            bars.trained(policy, loss)
            bars.trained(policy, loss)
            bars.validated(policy, loss)
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = file.getvalue().splitlines()
    assert lines[0] == "2/4  validation  FP32 2.5000  LEAN_BF16 2.2500"
    assert sum("validation  FP32" in line for line in lines) == 1
