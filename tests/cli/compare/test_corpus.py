"""The text is the library's own, split by path alone, and cut into the same windows for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everybit_cli.compare.corpus import Batches, Corpus, even_windows, is_held_out, load_corpus, source_files


def test_only_the_librarys_own_source_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    wanted = ["b/inner.py", "a.py", "b.py", "Z.py"]
    unwanted = [
        "site-packages/torch/nn.py",
        "email/test/test_mail.py",
        "idlelib/idle_test/x.py",
        "__pycache__/a.py",
        "_sysconfigdata__linux.py",
        "config-3.11/setup.py",
        "encodings/cp037.py",
        "a.txt",
    ]
    for name in wanted + unwanted:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)]
    assert found == sorted(wanted)


def test_a_file_is_held_out_because_of_its_path_and_not_of_its_neighbours() -> None:
    names = [f"folder/file_{number}.py" for number in range(2000)]
    share = sum(map(is_held_out, names)) / len(names)
    assert 0.07 < share < 0.13  # a tenth, within four standard deviations
    # Pinned: results of two versions can be compared only if they hold out the same files.
    assert [name for name in ("argparse.py", "ast.py", "json/decoder.py", "typing.py") if is_held_out(name)] == []


def test_every_byte_is_in_one_of_the_two_texts_and_a_separator_ends_each_file(tmp_path: Path) -> None:
    names = [f"module_{number}.py" for number in range(30)]
    for name in names:
        (tmp_path / name).write_text(f"# {name}\n")
    corpus = load_corpus(tmp_path)
    for text, held_out in ((corpus.training, False), (corpus.held_out, True)):
        own = sorted(name for name in names if is_held_out(name) is held_out)
        assert bytes(text.tolist()).decode() == "".join(f"# {name}\n\0" for name in own)
    assert corpus.training_files + corpus.held_out_files == len(names)


def test_the_digest_follows_the_text(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"module_{number}.py").write_text("x = 1\n")
    before = load_corpus(tmp_path).digest
    assert load_corpus(tmp_path).digest == before
    (tmp_path / "module_3.py").write_text("x = 2\n")
    assert load_corpus(tmp_path).digest != before


def test_a_python_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="found 0 source files"):
        load_corpus(tmp_path)


def test_the_standard_library_is_found_and_large_enough() -> None:
    corpus = load_corpus()
    assert len(corpus.training) > 4_000_000
    assert 0.03 < len(corpus.held_out) / len(corpus.training) < 0.3


def test_batches_are_the_same_for_the_same_seed_and_windows_of_the_text() -> None:
    text = torch.arange(50, dtype=torch.uint8)
    one, same, other = (Batches(text, batch=4, context=9, seed=seed) for seed in (3, 3, 4))
    seen = [one.next() for _ in range(200)]
    assert all(torch.equal(windows, same.next()) for windows in seen)
    assert not torch.equal(seen[0], other.next())
    starts = torch.cat([windows[:, 0] for windows in seen])
    assert all(torch.equal(windows, windows[:, :1] + torch.arange(10)) for windows in seen)
    assert starts.min() == 0
    assert starts.max() == 40  # the last window that fits: every byte is learnt from


@pytest.mark.parametrize(("length", "count", "expected"), [(100, 4, [0, 30, 60, 90]), (25, 4, [0, 15]), (10, 4, [0])])
def test_validation_windows_span_the_text_without_overlap(length: int, count: int, expected: list[int]) -> None:
    windows = even_windows(torch.arange(length, dtype=torch.uint8), count=count, context=9)
    assert windows[:, 0].tolist() == expected
    assert windows.shape == (len(expected), 10)


def test_a_window_as_long_as_the_text_is_the_text(corpus: Corpus) -> None:
    context = len(corpus.held_out) - 1
    windows = Batches(corpus.held_out, batch=2, context=context, seed=0).next()
    assert torch.equal(windows[1], corpus.held_out.long())
