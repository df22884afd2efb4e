"""Checkpoints of shards that are damaged, cut off or not whole: no bit that changed is loaded, and what is refused changes nothing."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import everybit as eb
from everybit_torch import AdamW, FlatStepper, latest_checkpoint, load_sharded, load_sharded_into, save_sharded
from everybit_torch.checkpoint.shard_tensor import ShardTensor
from everybit_torch.checkpoint.sharded import sharded_state_dict
from everybit_torch.sharded.strategies import Strategy
from tests.support.programs import Block, data, network
from tests.support.ranks import run

POLICY = eb.policies.LEAN_BF16  # which has residuals

Kind = Literal["stepper", "fsdp2", "plain"]
Bits = list[Tensor]


class Run:
    """A model in training, with its optimizer, on this rank: of one of the kinds that checkpoints are loaded into."""

    def __init__(self, kind: Kind, strategy: Strategy = "optim_grads_params", seed: int = 0, lr: float = 1e-2) -> None:
        self.model: Any = network(torch.bfloat16, seed)
        self.model.register_buffer("seen", torch.full((3,), float(seed)))
        self.step_number = 0
        if kind == "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh, ignored_params={self.model.scale})
        self.stepper, self.optimizer = None, None
        if kind == "stepper":
            self.stepper = FlatStepper(self.model, eb.adamw(lr), policy=POLICY, strategy=strategy, units=[Block])
        else:
            self.optimizer = AdamW(self.model.parameters(), lr=lr, policy=POLICY)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            x = data(self.step_number, 0, 0, torch.bfloat16)
            self.step_number += 1
            if self.stepper is not None:
                with self.stepper.microbatch(last=True):
                    self.model(x).float().square().mean().backward()
                self.stepper.step()
            else:
                assert self.optimizer is not None
                self.optimizer.zero_grad()
                self.model(x).float().square().mean().backward()
                self.optimizer.step()

    def load(self, path: Path) -> None:
        if self.stepper is not None:
            load_sharded(self.stepper, path)
        else:
            assert self.optimizer is not None
            load_sharded_into(self.model, self.optimizer, path)

    def bits(self) -> Bits:
        """Copies of everything that this rank has."""
        if self.stepper is not None:
            parts = [x.local if isinstance(x, ShardTensor) else x for x in sharded_state_dict(self.stepper).values()]
        else:
            assert self.optimizer is not None
            parts = [*self.model.state_dict().values()]
            parts += [x for state in self.optimizer.state.values() for x in state.values()]
            parts = [x.to_local() if isinstance(x, DTensor) else x for x in parts]
        return [x.detach().reshape(-1).view(torch.uint8).clone() for x in parts]


def same(one: Bits, other: Bits) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def saved(path: Path, strategy: Strategy = "optim_grads_params") -> None:
    made = Run("stepper", strategy)
    made.train(2)
    assert made.stepper is not None
    save_sharded(made.stepper, path)


@contextmanager
def damaged(path: Path, damage: Callable[[bytes], bytes | None], first: bool) -> Iterator[None]:
    """With one file damaged, or gone, by the first rank."""
    whole = path.read_bytes()
    changed = damage(whole)
    barrier()
    if first and changed is None:
        path.unlink()
    elif first and changed is not None:
        path.write_bytes(changed)
    barrier()
    try:
        yield
    finally:
        barrier()
        if first:
            path.write_bytes(whole)
        barrier()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def attempts(kind: Kind, path: Path, cases: list[tuple[str, Any]]) -> list[tuple[str, str, bool]]:
    """Load with one file after the other damaged: what was said, and whether what is there then is what was there, or what was saved.

    ``cases``: the file, and the number of a bit to flip, ``None`` to remove the file, or ``(bytes,)`` to cut it off after.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    twin = Run(kind)
    twin.load(path)
    right = twin.bits()
    here = Run(kind, seed=1, lr=0.5)
    here.train()
    outcomes: list[tuple[str, str, bool]] = []
    for name, what in cases:

        def damage(whole: bytes, what: Any = what) -> bytes | None:
            if what is None:
                return None
            if isinstance(what, tuple):
                return whole[: what[0]]
            byte, bit = divmod(what % (8 * len(whole)), 8)
            return whole[:byte] + bytes([whole[byte] ^ 1 << bit]) + whole[byte + 1 :]

        before = here.bits()
        with damaged(path / name, damage, first):
            try:
                here.load(path)
            except (ValueError, OSError) as error:
                outcomes.append((name, f"{type(error).__name__}: {error}", same(here.bits(), before)))
            else:
                outcomes.append((name, "", same(here.bits(), right)))
                here.train()  # so that it is another state again
    # And as it is not damaged any more, it goes in.
    here.load(path)
    assert same(here.bits(), right)
    return outcomes


def random_cases(path: Path, count: int, seed: int) -> list[tuple[str, Any]]:
    """Mostly in the data, and some in everything else."""
    random = Random(seed)
    files = [one for one in path.rglob("*") if one.is_file()]
    pieces = [one for one in files if one.suffix == ".distcp"]
    chosen = [random.choice(pieces if random.random() < 0.6 else files) for _ in range(count)]
    return [(str(one.relative_to(path)), random.randrange(8 * max(one.stat().st_size, 1))) for one in chosen]


@pytest.mark.parametrize(
    ("kind", "size", "count"),
    [
        ("stepper", 2, 30),
        *(pytest.param("stepper", size, 60, marks=pytest.mark.exhaustive) for size in (1, 3)),
        ("fsdp2", 2, 20),
    ],
)
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_no_flipped_bit_is_loaded(tmp_path: Path, kind: Kind, size: int, count: int) -> None:
    """Written by two ranks, read by one, two and three: every flip is an error on all ranks that changes nothing, or changes no value."""
    run(2, saved, tmp_path)
    cases = random_cases(tmp_path, count, seed=size)
    for outcomes in run(size, attempts, kind, tmp_path, cases):
        assert all(unharmed for _, _, unharmed in outcomes), outcomes
        in_data = [said for name, said, _ in outcomes if name.endswith(".distcp")]
        assert len(in_data) > count / 3
        # Every byte of these files is covered, and read by somebody; on the others it is said who found it.
        assert all(
            re.search(r"__\d_0\.distcp: bits of '(model|optimizer|hyperparam|groups)\S+' have changed", said)
            for said in in_data
        )
        in_inventory = [said for name, said, _ in outcomes if name.endswith("everybit.json")]
        assert all("everybit.json: bits have changed since it was written" in said for said in in_inventory)


@pytest.mark.exhaustive
def test_no_flipped_bit_is_loaded_by_a_plain_model(tmp_path: Path) -> None:
    run(3, saved, tmp_path, "optim")
    outcomes = attempts("plain", tmp_path, random_cases(tmp_path, 75, seed=0))
    assert all(unharmed for _, _, unharmed in outcomes), outcomes
    assert sum(said != "" for _, said, _ in outcomes) > 50


def whole_or_nothing(kind: Kind, path: Path) -> list[tuple[str, str, bool]]:
    folder = latest_checkpoint(path).name
    files = [f"{folder}/__{rank}_0.distcp" for rank in range(3)]
    cases: list[tuple[str, Any]] = [(file, what) for file in files for what in (None, (100,), (0,))]
    cases += [(f"{folder}/everybit.json", None), (f"{folder}/everybit.json", (700,)), (f"{folder}/.metadata", None)]
    return attempts(kind, path, [*cases, ("latest", (0,))])


@pytest.mark.parametrize(
    ("kind", "size"), [("stepper", 3), pytest.param("stepper", 2, marks=pytest.mark.exhaustive), ("fsdp2", 3)]
)
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(tmp_path: Path, kind: Kind, size: int) -> None:
    """A file of one rank gone, cut off, or empty: the others could have loaded their part."""
    run(3, saved, tmp_path)
    for outcomes in run(size, whole_or_nothing, kind, tmp_path):
        for name, said, unchanged in outcomes:
            assert said, name
            assert unchanged, (name, said)
        pieces = [said for name, said, _ in outcomes if name.endswith(".distcp")]
        for gone, *cut in (pieces[0:3], pieces[3:6], pieces[6:9]):
            assert re.search(r"FileNotFoundError: .*__\d_0.distcp: does not exist, and holds a part of '\S+'", gone)
            assert all(re.search(r"ValueError: .*__\d_0.distcp: was cut off: '\S+' takes bytes", one) for one in cut)
        assert "everybit.json: does not exist, and was written with this checkpoint" in outcomes[9][1]
        assert "everybit.json: bits have changed since it was written: it is no JSON" in outcomes[10][1]
        assert "is gone or not whole" in outcomes[11][1]
        assert "latest: bits have changed since it was written" in outcomes[12][1]


# -- the inventory ------------------------------------------------------------------------------------------------------------------


def made_alone(path: Path, seed: int = 0) -> Run:
    one = Run("stepper", "optim", seed)
    one.train()
    assert one.stepper is not None
    save_sharded(one.stepper, path)
    return one


def test_damage_to_the_inventory_is_told_with_the_tensor_it_is_about(tmp_path: Path) -> None:
    one = made_alone(tmp_path)
    path = latest_checkpoint(tmp_path) / "everybit.json"
    whole = path.read_bytes()
    lines = whole.splitlines()
    found: dict[str, int] = {}
    random, before = Random(3), one.bits()
    for _ in range(300):
        number = random.randrange(1, len(lines) - 1)
        line = bytearray(lines[number])
        line[random.randrange(len(line))] ^= 1 << random.randrange(8)
        path.write_bytes(b"\n".join([*lines[:number], bytes(line), *lines[number + 1 :]]))
        with pytest.raises(ValueError, match=r"everybit.json: bits have changed since it was written") as raised:
            one.load(tmp_path)
        # The bit may be one of the name's; and the line may be none of JSON, and told by its beginning.
        names = [repr(text.split(b'"')[1].decode("utf-8", "replace")) for text in (lines[number], bytes(line))]
        kind = (
            "named"
            if any(name in str(raised.value) for name in names)
            else "near"
            if "near" in str(raised.value)
            else "all"
        )
        found[kind] = found.get(kind, 0) + 1
    assert same(one.bits(), before)
    assert found["named"] > 250
    assert "all" not in found
    # A line that is gone, one of another checkpoint, and another order of files.
    made_alone(other := tmp_path / "other", seed=1)
    others = (latest_checkpoint(other) / "everybit.json").read_bytes().splitlines()
    assert [line.split(b'"')[1] for line in lines[1:-1]] == [line.split(b'"')[1] for line in others[1:-1]]
    for changed in (
        [*lines[:3], *lines[4:]],
        [*lines[:3], others[3], *lines[4:]],
        [lines[0].replace(b"__0_0", b"__1_0"), *lines[1:]],
    ):
        path.write_bytes(b"\n".join(changed))
        with pytest.raises(
            ValueError,
            match=r"everybit.json: bits have changed since it was written: the checksum of all of it differs",
        ):
            one.load(tmp_path)
    for text in ("", "[]", "{}", '{"format": 1}', "[" * 100_000, "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"everybit.json: "):
            one.load(tmp_path)
    for number in (1, 3):
        path.write_bytes(whole.replace(b'"format": 2', f'"format": {number}'.encode()))
        with pytest.raises(ValueError, match=rf"has format {number}; accepted by this version is 2"):
            one.load(tmp_path)
    path.write_bytes(whole)
    one.load(tmp_path)


def test_torchs_own_functions_read_what_was_written(tmp_path: Path) -> None:
    one = made_alone(tmp_path)
    assert one.stepper is not None
    state = sharded_state_dict(one.stepper)
    into = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in state.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(into, checkpoint_id=latest_checkpoint(tmp_path), no_dist=True)
    for name, x in state.items():
        here = x.local.view(x.shape) if isinstance(x, ShardTensor) else x
        assert torch.equal(into[name], here), name


# -- without an inventory -----------------------------------------------------------------------------------------------------------


def by_dcp(path: Path, seed: int = 0) -> Run:
    """As the first versions saved, and as anybody can."""
    one = Run("stepper", "optim", seed)
    one.train()
    assert one.stepper is not None
    state = {name: x for name, x in sharded_state_dict(one.stepper).items() if not name.startswith("groups.")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(state, checkpoint_id=path / "000001", no_dist=True)
    (path / "000001" / ".everybit").touch()
    (path / "latest").write_text("000001")
    return one


def test_checkpoints_without_checksums_load_and_it_is_said(tmp_path: Path) -> None:
    one = by_dcp(tmp_path)
    for path in (tmp_path, tmp_path / "000001"):
        other = Run("stepper", "optim", seed=1, lr=0.5)
        with pytest.warns(UserWarning, match=r"000001: has no checksums .* nothing could be verified") as caught:
            other.load(path)
        assert len(caught) == 1
        assert same(one.bits(), other.bits())
    plain = Run("plain", seed=1)
    with pytest.warns(UserWarning, match=r"has no checksums"):
        plain.load(tmp_path)


def wholes(one: Run) -> dict[str, Tensor]:
    """Copies of everything that the only rank of a stepper saves, as plain tensors."""
    assert one.stepper is not None
    state: dict[str, Any] = sharded_state_dict(one.stepper, clone=True)
    return {name: x.local.view(x.shape) if isinstance(x, ShardTensor) else x for name, x in state.items()}


def test_remainders_of_32_bits_are_read_if_16_bits_have_them(tmp_path: Path) -> None:
    """As checkpoints hold them that went through gloo or NCCL, which have no int16."""
    one = Run("stepper", "optim")
    one.train()
    state = {name: x.int() if x.dtype is torch.int16 else x for name, x in wholes(one).items()}
    other = Run("stepper", "optim", seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are no checksums, and one process
        dcp_save(state, checkpoint_id=tmp_path / "whole", no_dist=True)
        other.load(tmp_path / "whole")
        assert same(one.bits(), other.bits())
        state["optimizer.state.entry.weight.param.remainder"][0, 0] = 1 << 15
        dcp_save(state, checkpoint_id=tmp_path / "beyond", no_dist=True)
        with pytest.raises(ValueError, match=r"entry.weight.param.remainder: holds numbers beyond torch.int16"):
            other.load(tmp_path / "beyond")
    assert same(one.bits(), other.bits())


@pytest.mark.parametrize("kind", ["stepper", "plain"])
def test_a_count_that_counts_nothing_is_refused_by_name(tmp_path: Path, kind: Kind) -> None:
    one = Run("stepper", "optim")
    one.train()
    state = wholes(one)
    state["optimizer.state.entry.weight.step"].fill_(-1)
    other = Run(kind, "optim", seed=1)
    other.train()
    before = other.bits()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are no checksums, and one process
        dcp_save(state, checkpoint_id=tmp_path, no_dist=True)
        with pytest.raises(ValueError, match=r"optimizer.state.entry.weight.step"):
            other.load(tmp_path)
    assert same(before, other.bits())


class Opens:
    """What a pickle may do."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_reading_runs_nothing_from_a_checkpoint(tmp_path: Path) -> None:
    one = by_dcp(tmp_path)
    victim = tmp_path / "written"
    metadata = tmp_path / "000001" / ".metadata"
    whole = pickle.loads(metadata.read_bytes())
    for make in (lambda: Opens(str(victim)), lambda: replaced(whole, Opens(str(victim))), lambda: {"os": os.system}):
        metadata.write_bytes(pickle.dumps(make()))
        before = one.bits()
        with pytest.raises(
            ValueError,
            match=r"\.metadata: is no metadata of torch.distributed.checkpoint.* it names (_?io.open|posix.system)",
        ):
            one.load(tmp_path)
        assert not victim.exists()
        assert same(one.bits(), before)


def replaced(metadata: Any, value: Any) -> Any:
    metadata.planner_data = value
    return metadata


@pytest.mark.slow
def test_many_damaged_metadata_files_are_refused_by_name_or_load(tmp_path: Path) -> None:
    """Where nothing vouches for it, a flip may be taken for what was written; but never for something that is not there."""
    one = by_dcp(tmp_path)
    metadata = tmp_path / "000001" / ".metadata"
    whole, random, said = metadata.read_bytes(), Random(11), []
    other = Run("stepper", "optim", seed=1)
    for _ in range(120):
        changed = bytearray(whole if random.random() < 0.9 else whole[: random.randrange(len(whole))])
        for _ in range(random.choice([1, 1, 1, 4])):
            if changed:
                changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        metadata.write_bytes(bytes(changed))
        before = other.bits()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other.load(tmp_path)
        except (ValueError, OSError) as error:
            said.append(str(error))
            assert same(other.bits(), before)
    assert [one for one in said if str(tmp_path / "000001") not in one] == []
    assert len(said) > 50
    metadata.write_bytes(whole)
    with pytest.warns(UserWarning, match="has no checksums"):
        other.load(tmp_path)
    assert same(one.bits(), other.bits())


def test_pieces_that_overlap_are_refused(tmp_path: Path) -> None:
    """The same number of elements, some of them twice, so that others would be whatever was in memory."""
    one = by_dcp(tmp_path)
    metadata = tmp_path / "000001" / ".metadata"
    found = pickle.loads(metadata.read_bytes())
    entry = found.state_dict_metadata["model.entry.weight"]
    half, rest = torch.Size([2, 3]), torch.Size([3, 3])
    kind, index = type(entry.chunks[0]), type(next(iter(found.storage_data)))
    place = found.storage_data.pop(index("model.entry.weight", torch.Size([0, 0])))
    entry.chunks = [kind(torch.Size([0, 0]), rest), kind(torch.Size([1, 0]), half)]
    for chunk in entry.chunks:
        found.storage_data[index("model.entry.weight", chunk.offsets)] = place
    metadata.write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"\.metadata: 'model.entry.weight': pieces of it overlap"):
        one.load(tmp_path)


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    one = by_dcp(tmp_path)
    shutil.copy(tmp_path / "000001" / "__0_0.distcp", tmp_path / "elsewhere.distcp")
    metadata = tmp_path / "000001" / ".metadata"
    whole = pickle.loads(metadata.read_bytes())
    for name in ("../elsewhere.distcp", str(tmp_path / "elsewhere.distcp"), ".."):
        for place in whole.storage_data.values():
            place.relative_path = name
        metadata.write_bytes(pickle.dumps(whole))
        with pytest.raises(ValueError, match=r"\.metadata: '\S+': .* lies in .*, which is no file of this folder"):
            one.load(tmp_path)


# -- a full disk --------------------------------------------------------------------------------------------------------------------


def disk_full(path: Path, full: int) -> tuple[str, bool, bool]:
    """One rank's files may grow to a few hundred bytes, which is where its disk would be full."""
    import resource
    import signal

    one = Run("stepper")
    one.train()
    assert one.stepper is not None
    save_sharded(one.stepper, path)
    before = one.bits()
    one.train()
    after = one.bits()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        save_sharded(one.stepper, path, asynchronous=full == 1).result(60)
        raise AssertionError("it was saved")
    except OSError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    dist.barrier()
    alone = sorted(x.name for x in path.iterdir()) == ["000001", "latest"]
    unharmed = same(one.bits(), after)
    one.load(path)
    return message, alone, unharmed and same(one.bits(), before)


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_the_previous_checkpoint_alone(tmp_path: Path, full: int) -> None:
    for message, alone, unharmed in run(2, disk_full, tmp_path, full):
        assert re.search(
            rf"000002: saving failed on rank {full}: .*__{full}_0.distcp: writing it failed: File too large\. The previous checkpoint is"
            r" in place\.",
            message,
        )
        assert alone
        assert unharmed


def test_the_inventory_is_plain_json(tmp_path: Path) -> None:
    made_alone(tmp_path)
    found = json.loads((latest_checkpoint(tmp_path) / "everybit.json").read_text())
    entry = found["tensors"]["model.entry.weight"]
    assert (entry["dtype"], entry["shape"]) == ("bfloat16", [5, 3])
    assert found["files"] == ["__0_0.distcp"]


def test_a_save_whose_last_step_fails_leaves_nothing(tmp_path: Path) -> None:
    """All is written, and the file that names it cannot be."""
    one = Run("stepper", "optim")
    assert one.stepper is not None
    (tmp_path / "latest").mkdir()
    with pytest.raises(IsADirectoryError, match=r"latest: is a directory"):
        save_sharded(one.stepper, tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["latest"]
    (tmp_path / "latest").rmdir()
    save_sharded(one.stepper, tmp_path)
    one.load(tmp_path)
