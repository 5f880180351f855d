"""`flatparam.load_pretrained`: ranks read their own bytes of somebody's weights, in whatever files they are."""

from __future__ import annotations

import re
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from flatparam import (
    Checkpointer,
    CheckpointError,
    MixedPrecision,
    PretrainedReport,
    ShardingStrategy,
    fully_shard,
    load_pretrained,
)
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_checkpoint.pretrained.loading import _settings_alike
from flatparam_comm import Collectives, SingleCollectives
from flatparam_comm.testing import run_processes
from flatparam_files.disk.system import ByteFile
from flatparam_state import open_source, read_pretrained, write_dcp, write_hugging_face

MODELS, WORLDS = (import_module(f"packages.flatparam.tests.{name}") for name in ("models", "worlds"))
Batch, Block, Transformer = MODELS.Batch, MODELS.Block, MODELS.Transformer
mlp, seeded = MODELS.mlp, MODELS.seeded
assert_same_state, node_groups, on_ranks = WORLDS.assert_same_state, WORLDS.node_groups, WORLDS.on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")


@pytest.fixture(params=[False, True], ids=["flat", "originals"])
def use_orig_params(request: pytest.FixtureRequest) -> bool:
    """Both exposures."""
    return bool(request.param)


LINEAR = ModuleWrapPolicy({nn.Linear})
FORMATS = ["one file", "several files", "bin", "several bins", "dcp", "own"]


class Rotary(nn.Module):
    """A model with a cache that it computes when it is made, and that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.register_buffer("inv_freq", 1.0 / (10 ** (torch.arange(4) / 4)), persistent=False)
        self.register_buffer("scale", torch.ones(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        # Column after column.
        self.odd = nn.Parameter(torch.randn(5, 7).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.inv_freq.repeat(2) + self.odd.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.sum()


def disturbed(make: Callable[[], nn.Module] = Rotary) -> nn.Module:
    """A model with weights and buffers of somebody else."""
    model = seeded(make, 3)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n == "scale")):
            tensor.add_(torch.randn_like(tensor))
    return model


def written(model: nn.Module, kind: str, folder: Path) -> Path:
    """The state of a model in files."""
    bins = folder / "bins"
    bins.mkdir()
    torch.save(model.state_dict(), bins / "pytorch_model.bin")
    if kind == "bin":
        return bins
    source = open_source(bins)
    if kind == "one file":
        write_hugging_face(source, folder / "model.safetensors")
        return folder / "model.safetensors"
    if kind == "several files":
        write_hugging_face(source, folder / "hf", max_shard_nbytes=200)
        assert len(list((folder / "hf").glob("*.safetensors"))) > 2
        return folder / "hf"
    if kind == "several bins":
        return several_bins(model, folder / "several")
    if kind == "dcp":
        write_dcp(source, folder / "dcp", world_size=2)
        return folder / "dcp"
    Checkpointer(folder / "own", model, ranks=SingleCollectives()).save(1)
    return folder / "own"


def several_bins(model: nn.Module, folder: Path) -> Path:
    folder.mkdir()
    entries = list(model.state_dict().items())
    parts = {"pytorch_model-1.bin": entries[::2], "pytorch_model-2.bin": entries[1::2]}
    weights = ", ".join(f'"{name}": "{file}"' for file, each in parts.items() for name, _ in each)
    for file, each in parts.items():
        torch.save({name: value.clone() for name, value in each}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(f'{{"weight_map": {{{weights}}}}}', encoding="utf-8")
    return folder


def same_values(found: Any, expected: Any) -> None:
    """Assert the same names and bits; memory order does not count."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype, name


@pytest.fixture
def read_nbytes() -> Iterator[list[int]]:
    """The sizes of everything that is read of files."""
    sizes: list[int] = []
    read = ByteFile.read_into

    def counting(file: ByteFile, offset: int, nbytes: int, view: memoryview) -> None:
        sizes.append(nbytes)
        read(file, offset, nbytes, view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteFile, "read_into", counting)
        yield sizes


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind: str, tmp_path: Path, use_orig_params: bool) -> None:
    """From each format the model has the weights of the files, bit for bit, computed caches and tied parameters."""
    expected = disturbed()
    path = written(expected, kind, tmp_path)

    def rank(world: Collectives) -> Any:
        model = load_pretrained(
            lambda: seeded(Rotary),
            path,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
        )
        assert isinstance(model, FSDP)
        assert torch.equal(model.inv_freq, expected.inv_freq)
        tokens = torch.tensor([[1, 2, 3]])
        assert torch.equal(model(tokens), expected(tokens))
        return model.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for state in on_ranks(2, rank):
            same_values(state, expected.state_dict())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("kind", ["several files", "bin"])
def test_each_byte_is_read_once(
    strategy: str, kind: str, tmp_path: Path, read_nbytes: list[int], use_orig_params: bool
) -> None:
    """All four ranks together read the bytes of the tensors once, also where ranks hold copies, and buffers too."""
    path = written(disturbed(lambda: nn.Sequential(Batch(), mlp())), kind, tmp_path)

    def opened(world: Collectives) -> None:
        if world.rank == 0:
            read_nbytes.clear()
            open_source(path)
        world.barrier()

    on_ranks(4, opened)
    headers = sum(read_nbytes)

    def rank(world: Collectives) -> PretrainedReport:
        if world.rank == 0:
            read_nbytes.clear()
        group = node_groups(world) if strategy == "HYBRID_SHARD" else None
        return load_pretrained(
            lambda: nn.Sequential(Batch(), mlp()),
            path,
            output_loading_info=True,
            auto_wrap_policy=LINEAR,
            process_group=group or world,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )[1]

    reports = on_ranks(4, rank)
    assert sum(report.nbytes_read for report in reports) == reports[0].nbytes
    assert sum(read_nbytes) - 4 * headers == reports[0].nbytes
    assert all(report.nbytes_read > 0 for report in reports)


def peak_nbytes() -> int:
    """The most memory that this process had since `clear_refs` was written."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found[1]) * 1024 if found else 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell")
@pytest.mark.processes
def test_memory(tmp_path: Path) -> None:
    """The peak of both ranks together is their shards, and for each rank a tensor at most: never a whole model."""
    path = written(disturbed(_wide), "one file", tmp_path)
    whole, largest = 4 * 4 * (2048 * 2048 + 2048), 4 * 2048 * 2048
    # A process of its own, in which no other test has left memory to take again.
    ((held, peak),) = run_processes(1, _held_and_peak, path)
    assert held == whole
    assert peak < whole + 2 * largest


def _wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))


def _held_and_peak(process: Collectives, path: Path) -> tuple[int, int]:
    """The bytes of the parameters of two ranks that are threads here, and the most that loading them took."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = peak_nbytes()
    models = on_ranks(2, lambda world: load_pretrained(_wide, path))
    peak = peak_nbytes() - before
    return sum(parameter.nbytes for model in models for parameter in model.parameters()), peak


def test_cast(tmp_path: Path) -> None:
    """Values are cast to the parameters' dtype while they are read, to the bits of a cast afterwards."""
    expected = disturbed(mlp)
    path = written(expected, "one file", tmp_path)

    def rank(world: Collectives) -> Any:
        cast = load_pretrained(mlp, path, dtype=torch.bfloat16)
        back = load_pretrained(lambda: mlp().double(), path, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        return cast.state_dict(), back.state_dict()

    for cast, back in on_ranks(2, rank):
        same_values(cast, expected.bfloat16().state_dict())
        assert {value.dtype for value in back.values()} == {torch.float64}


def test_names(tmp_path: Path) -> None:
    """A function, or a mapping, says what the tensors of the files are called in the model."""
    expected = disturbed(mlp)
    path = written(nn.ModuleDict({"model": expected}), "one file", tmp_path)

    def rank(world: Collectives) -> Any:
        found = {name: name.removeprefix("model.") for name in expected_names}
        by_mapping = load_pretrained(mlp, path, mapping=found, strict=True)
        by_function = load_pretrained(mlp, path, mapping=lambda name: name.removeprefix("model."), strict=True)
        same_values(by_mapping.state_dict(), by_function.state_dict())
        with pytest.raises(CheckpointError, match=r"no name is the model's: 'model.*pass mapping="):
            load_pretrained(mlp, path)
        return by_mapping.state_dict()

    expected_names = [f"model.{name}" for name in expected.state_dict()]
    for state in on_ranks(2, rank):
        same_values(state, expected.state_dict())


def test_missing_and_unexpected(tmp_path: Path, use_orig_params: bool) -> None:
    """What the files lack begins anew, what the model lacks is left out, and the first rank warns of both; or `strict`."""
    state = disturbed(mlp).state_dict()
    path = tmp_path / "pytorch_model.bin"
    torch.save({**{n: v for n, v in state.items() if not n.startswith("4")}, "old": torch.ones(2)}, path)

    def rank(world: Collectives) -> Any:
        with pytest.raises(CheckpointError, match=r"rank 0: .* files lack '4\.\w+', '4\.\w+'; the model lacks 'old'"):
            load_pretrained(mlp, path, strict=True)
        torch.manual_seed(7)
        model, report = load_pretrained(
            mlp, path, output_loading_info=True, auto_wrap_policy=LINEAR, use_orig_params=use_orig_params
        )
        return model.state_dict(), report

    torch.manual_seed(7)
    begun = nn.Linear(7, 1)
    with pytest.warns(UserWarning, match="pytorch_model.bin") as caught:
        results = on_ranks(2, rank)
    told = [str(each.message) for each in caught]
    assert ["initial values" in each or "'old', which the model lacks" in each for each in told] == [True] * 2
    for found, report in results:
        same_values(found, {**state, "4.weight": begun.weight, "4.bias": begun.bias})
        assert sorted(report.missing_keys) == ["4.bias", "4.weight"]
        assert report.unexpected_keys == ("old",)


@pytest.mark.parametrize("strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD])
def test_copies_of_what_is_missing(strategy: ShardingStrategy, tmp_path: Path, use_orig_params: bool) -> None:
    """What the files lack is drawn anew, and is the same in all copies of a shard, whatever seeds the ranks have."""
    state = disturbed(mlp).state_dict()
    path = tmp_path / "pytorch_model.bin"
    torch.save({name: value for name, value in state.items() if not name.startswith("4")}, path)

    def rank(world: Collectives) -> Any:
        torch.manual_seed(world.rank)
        hybrid = strategy is ShardingStrategy.HYBRID_SHARD
        model = load_pretrained(
            mlp,
            path,
            process_group=node_groups(world) if hybrid else None,
            auto_wrap_policy=LINEAR,
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
        )
        return model.state_dict()

    found = on_ranks(4, rank)
    for each in found[1:]:
        same_values(each, found[0])
    same_values({name: found[0][name] for name in state if not name.startswith("4")}, torch.load(path))
    assert not torch.equal(found[0]["4.weight"], state["4.weight"])


@pytest.mark.parametrize(
    "different",
    [
        lambda rank: (
            mlp,
            {"use_orig_params": bool(rank)},
            "use_orig_params is True here, and False on rank 0",
        ),
        lambda rank: (
            mlp,
            {"dtype": torch.float64 if rank else None},
            "dtype is torch.float64 here, and None on rank 0",
        ),
        lambda rank: (mlp, {"strict": not rank}, "strict is False here, and True on rank 0"),
        lambda rank: (
            mlp,
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP if rank else None},
            "sharding_strategy is .*SHARD_GRAD_OP.* here, and None on rank 0",
        ),
        lambda rank: (
            (lambda: nn.Sequential(*mlp(), nn.Linear(1, 2))) if rank else mlp,
            {},
            "its model has other parameters than on rank 0",
        ),
    ],
    ids=["exposures", "dtypes", "strict", "strategies", "models"],
)
def test_ranks_that_load_differently(different: Any, tmp_path: Path) -> None:
    """Every rank raises before anything is made: what ranks would gather of such models is a mixture."""
    path = tmp_path / "pytorch_model.bin"
    torch.save(mlp().state_dict(), path)

    def rank(world: Collectives) -> None:
        make, arguments, _ = different(world.rank)
        with pytest.raises(CheckpointError, match=f"rank 1: .*{different(1)[2]}"):
            load_pretrained(make, path, **arguments)

    on_ranks(2, rank)


def test_each_rank_may_have_a_device_of_its_own() -> None:
    """`device_id=local_rank` is no difference between ranks; other plain arguments are compared."""
    ours, theirs = (
        {"device_id": rank, "use_orig_params": True, "sharding_strategy": ShardingStrategy.FULL_SHARD}
        for rank in (0, 1)
    )
    assert _settings_alike(ours) == _settings_alike(theirs)
    assert _settings_alike({**ours, "use_orig_params": False}) != _settings_alike(theirs)


def test_tied(tmp_path: Path) -> None:
    """A tied parameter that the files have under one name is not missing; the report says where it came from."""
    expected = disturbed(Transformer)
    path = written(expected, "one file", tmp_path)

    def rank(world: Collectives) -> None:
        model, report = load_pretrained(Transformer, path, output_loading_info=True, strict=True)
        assert report.tied_keys == {"head.weight": "embed.weight"}
        assert report.missing_keys == ()
        assert_same_state(model.state_dict(), expected.state_dict())

    on_ranks(2, rank)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_tied_under_both_names(tmp_path: Path, strategy: ShardingStrategy) -> None:
    """If files have a tied parameter twice, both are read and compared; different values are an error on every rank."""
    expected = disturbed(Transformer)
    state = {name: value.detach().clone() for name, value in expected.state_dict().items()}
    path, other = tmp_path / "same.safetensors", tmp_path / "other.safetensors"
    torch.save(state, tmp_path / "same.bin")
    # The last elements are on the last rank.
    state["head.weight"][-1, -1] += 1
    torch.save(state, tmp_path / "other.bin")
    for file in (path, other):
        write_hugging_face(open_source(tmp_path / f"{file.stem}.bin"), file)

    def load(path: Path, **options: Any) -> Any:
        return load_pretrained(Transformer, path, sharding_strategy=strategy, output_loading_info=True, **options)

    def rank(world: Collectives) -> tuple[int, int]:
        model, report = load(path, strict=True)
        assert_same_state(model.state_dict(), expected.state_dict())
        said = "'embed.weight' and 'head.weight' are one parameter .*different values.*without that tie"
        with pytest.raises(CheckpointError, match=said):
            load(other)
        model, _ = load(other, mapping={"head.weight": "old"})
        assert_same_state(model.state_dict(), expected.state_dict())
        return report.nbytes_read, report.nbytes

    with pytest.warns(UserWarning, match="'old', which the model lacks"):
        results = on_ranks(2, rank)
    # Each byte is read once, of both.
    assert sum(read for read, _ in results) == results[0][1]


def test_what_does_not_fit(tmp_path: Path) -> None:
    """Shapes and dtypes that differ are named on every rank before a model that was passed is touched."""
    state = disturbed(mlp).state_dict()
    path = tmp_path / "pytorch_model.bin"
    torch.save({**state, "0.weight": torch.ones(3, 5), "2.bias": torch.ones(7, dtype=torch.int8)}, path)

    def rank(world: Collectives) -> None:
        with torch.device("meta"):
            model = mlp()
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(model, path, auto_wrap_policy=LINEAR)
        assert "'0.weight': expected shape (5, 3), found (3, 5)" in str(caught.value)
        assert "'2.bias': expected torch.float32, found torch.int8" in str(caught.value)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not any(isinstance(module, FSDP) for module in model.modules())

    on_ranks(2, rank)


def test_files_of_one_rank(tmp_path: Path) -> None:
    """If one rank has no files, or others, or cannot read on, every rank raises an error that names it."""
    written(disturbed(mlp), "one file", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    written(disturbed(lambda: mlp().double()), "one file", other)
    path = tmp_path / "model.safetensors"

    def rank(world: Collectives) -> None:
        second = world.rank == 1
        with pytest.raises(CheckpointError, match=r"^rank 1: .*nowhere does not exist"):
            load_pretrained(mlp, tmp_path / "nowhere" if second else path)
        with pytest.raises(CheckpointError, match=r"rank 1: .*has other names, shapes or dtypes .* than on rank 0"):
            load_pretrained(mlp, other / "model.safetensors" if second else path)

    on_ranks(2, rank)


@pytest.mark.parametrize("form", ["one file", "torch", "ours"])
def test_values_of_one_rank(form: str, tmp_path: Path) -> None:
    """Ranks that read equal copies load them; if one's copy has other values, of one tensor only, every rank is told."""
    folders = [tmp_path / name for name in ("first", "copy", "other")]
    for folder in folders:
        folder.mkdir()
        model = disturbed(mlp)
        if folder.name == "other":
            with torch.no_grad():
                [*model.parameters()][-1].add_(1)
        if form == "one file":
            written(model, "one file", folder)
        elif form == "torch":
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
        else:
            with Checkpointer(folder, model, ranks=SingleCollectives()) as checkpointer:
                checkpointer.save(1)

    def rank(world: Collectives) -> None:
        expected = load_pretrained(mlp, folders[0]).state_dict()
        same_values(load_pretrained(mlp, folders[1 if world.rank else 0]).state_dict(), expected)
        with pytest.raises(CheckpointError, match=r"^rank 1: .*has other values than on rank 0"):
            load_pretrained(mlp, folders[2 if world.rank else 0])

    on_ranks(2, rank)


def wrong_on_one_rank(world: Collectives, path: Path, process_group: str | None) -> list[str]:
    """Call what raises on rank 1 alone, in every way; the ranks go on together after each."""

    def factory() -> nn.Module:
        if world.rank == 1:
            raise KeyError("no configuration")
        return mlp()

    def mapping(name: str) -> str:
        return {}[name] if world.rank == 1 else name

    calls: list[Callable[[], object]] = [
        lambda: load_pretrained(factory, path, process_group=process_group),
        lambda: load_pretrained(mlp, path, mapping=mapping, process_group=process_group),
        lambda: load_pretrained(
            mlp,
            None if world.rank == 1 else path,
            process_group=process_group,  # type: ignore[arg-type]
        ),
    ]
    said = []
    for call in calls:
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        world.barrier()
    model = load_pretrained(mlp, path, process_group=process_group)
    assert isinstance(model, FSDP)
    return said


def assert_told(ranks: list[list[str]]) -> None:
    first, second = ranks
    assert first[0] == (
        "CheckpointError: rank 1: KeyError: 'no configuration'; the model was not made there; nothing was read"
    )
    assert second[0] == "KeyError: 'no configuration'"
    assert first[1] == second[1] == "CheckpointError: rank 1: KeyError: '0.bias'"
    wanted = "TypeError: load_pretrained: expected the path of a file or a folder, found None"
    assert second[2] == wanted
    assert first[2] == f"CheckpointError: rank 1: {wanted}; the model was not made there; nothing was read"


def test_what_raises_on_one_rank(tmp_path: Path) -> None:
    """If the model's function, the mapping or an argument is wrong on one rank, the others are told before they wait."""
    path = written(disturbed(mlp), "one file", tmp_path)
    assert_told(on_ranks(2, wrong_on_one_rank, path, None))


@pytest.mark.processes
@pytest.mark.parametrize("process_group", [None, "shared_memory"], ids=["gloo", "shared memory"])
def test_what_raises_on_one_process(process_group: str | None, tmp_path: Path) -> None:
    """The same in processes, through gloo and through shared memory, which `process_group` names."""
    path = written(disturbed(mlp), "one file", tmp_path)
    assert_told(run_processes(2, wrong_on_one_rank, path, process_group))


def test_a_refused_model_keeps_its_dtype(tmp_path: Path) -> None:
    """A model on the meta device that the files do not fit has the dtypes that it had, whatever `dtype` was asked for."""
    path = written(disturbed(mlp), "one file", tmp_path)

    def rank(world: Collectives) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(9, 9))
        with pytest.raises(CheckpointError, match=r"expected shape \(9, 9\), found \(5, 3\)"):
            load_pretrained(model, path, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    on_ranks(2, rank)


def test_a_function_that_shards(tmp_path: Path) -> None:
    """A function may return a sharded model, whose values are replaced; arguments that would have no effect are refused."""
    expected = disturbed(mlp)
    path = written(expected, "one file", tmp_path)

    def rank(world: Collectives) -> None:
        model = load_pretrained(lambda: fully_shard(seeded(mlp)), path)
        same_values(model.state_dict(), expected.state_dict())
        with pytest.raises(ValueError, match="sharded already, so dtype would have no effect"):
            load_pretrained(lambda: fully_shard(seeded(mlp)), path, dtype=torch.bfloat16)

    on_ranks(2, rank)


def test_files_that_change(tmp_path: Path) -> None:
    """If a rank cannot read on, once the names were compared, every rank raises the error with its number."""
    path = written(disturbed(mlp), "one file", tmp_path)

    def cut(*arguments: Any, **named: Any) -> Any:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 8)
        return read_pretrained(*arguments, **named)

    def rank(world: Collectives) -> None:
        with pytest.raises(
            CheckpointError,
            match=r"^rank 1: (?!CheckpointError).*expected.*the values of the model are not usable",
        ):
            load_pretrained(mlp, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatparam_checkpoint.pretrained.loading.read_pretrained", cut)
        on_ranks(2, rank)


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    """It is filled if the files have its buffers; a cache that nothing computes is refused by name, and not garbage."""
    expected = disturbed(Rotary)
    path = written(expected, "several files", tmp_path)
    other = tmp_path / "mlp"
    other.mkdir()
    batch = disturbed(Batch)
    with_buffers = written(batch, "one file", other)

    def rank(world: Collectives) -> None:
        with torch.device("meta"):
            model, batches = Rotary(), Batch()
        with pytest.raises(CheckpointError, match=r"the buffers 'inv_freq' are on the meta device.*pass the function"):
            load_pretrained(model, path)
        batches.cache = torch.ones(2)
        loaded = load_pretrained(batches, with_buffers)
        same_values(loaded.state_dict(), batch.state_dict())

    on_ranks(2, rank)


def test_wrong_arguments(tmp_path: Path) -> None:
    """What is no path, no dtype, or a function that returns no module is named in a TypeError, before any file is read."""
    path = tmp_path / "nothing"

    def rank(world: Collectives) -> None:
        with pytest.raises(TypeError, match="expected a module, or a function that makes one, found 3"):
            load_pretrained(3, path)
        with pytest.raises(TypeError, match="expected the path of a file or a folder, found None"):
            load_pretrained(mlp, None)
        with pytest.raises(TypeError, match=r"expected a dtype, such as torch\.bfloat16, found 'bfloat16'"):
            load_pretrained(mlp, path, dtype="bfloat16")
        with pytest.raises(TypeError, match="expected a function that returns a module, and it returned None"):
            load_pretrained(lambda: None, path)

    on_ranks(2, rank)


def test_a_model_that_is_sharded(tmp_path: Path) -> None:
    """Modules of `fully_shard`, and wrapped ones with ignored parameters, get new values in their place."""
    expected = disturbed(mlp)
    path = written(expected, "one file", tmp_path)

    def rank(world: Collectives) -> None:
        model = fully_shard(seeded(mlp))
        assert load_pretrained(model, path) is model
        same_values(model.state_dict(), expected.state_dict())
        with pytest.raises(ValueError, match="sharded already, so use_orig_params would have no effect"):
            load_pretrained(model, path, use_orig_params=True)
        with pytest.raises(ValueError, match="sync_module_states sends rank 0's values"):
            load_pretrained(mlp, path, sync_module_states=True)
        partly = seeded(mlp)
        partly = FSDP(partly, ignored_modules=[partly[0]])
        load_pretrained(partly, path)
        same_values(partly.state_dict(), expected.state_dict())

    on_ranks(2, rank)


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first rank shows a bar over its bytes, if it is asked to, and no other does."""
    pytest.importorskip("tqdm")
    path = written(disturbed(mlp), "one file", tmp_path)
    on_ranks(2, lambda world: load_pretrained(mlp, path, progress=True) and None)
    # On a busy machine a bar may be drawn at 100 % before it is drawn for the last time, in the same line.
    lines = capsys.readouterr().err.split("\n")
    assert sum("load model.safetensors: 100%" in line for line in lines) == 1


class Scale(nn.Module):
    """Without `reset_parameters()`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_what_nothing_gives_values_to(tmp_path: Path) -> None:
    """A parameter that the files lack, of a module that cannot begin it, is named before anything is made, or begun anew."""
    state = nn.Linear(3, 5).state_dict()
    torch.save(
        {**{f"0.{name}": value for name, value in state.items()}, "1.gain": torch.ones(5)},
        tmp_path / "a.bin",
    )

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), Scale())

    def begin(module: nn.Module) -> None:
        if isinstance(module, Scale):
            module.weight = nn.Parameter(torch.full((5,), 2.0))

    def rank(world: Collectives) -> None:
        said = r"lack '1\.weight' \(they have '1\.gain', which the model lacks\), and no module gives values .*mapping="
        with pytest.raises(CheckpointError, match=said):
            load_pretrained(make, tmp_path / "a.bin")
        model = load_pretrained(make, tmp_path / "a.bin", mapping={"1.gain": "1.weight"})
        assert torch.equal(model.state_dict()["1.weight"], torch.ones(5))
        model = load_pretrained(make, tmp_path / "a.bin", param_init_fn=begin)
        assert torch.equal(model.state_dict()["1.weight"], torch.full((5,), 2.0))
        # The values of a model that has some stay.
        model = FSDP(make())
        load_pretrained(model, tmp_path / "a.bin")
        assert torch.equal(model.state_dict()["1.weight"], torch.full((5,), 3.0))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(2, rank)


class PreTrainedModel(nn.Sequential):
    """As that of transformers, as far as loading asks."""

    base_model_prefix = "encoder"


@attrs.define
class WeightRenaming:
    """As that of transformers."""

    source: str
    target: str


@attrs.define
class WeightConverter:
    """As that of transformers, for one number in a name."""

    source_patterns: list[str]
    target: str
    operations: list[Callable[[list[Any]], Any]]
    tensors: dict[str, list[Any]] = attrs.field(factory=dict)

    def add_tensor(self, target: str, source: str, pattern: str, tensor: Any) -> None:
        """Take a tensor of a file."""
        self.tensors.setdefault(pattern, []).append(tensor)

    def convert(self, name: str, model: nn.Module, config: Any) -> dict[str, Any]:
        """The tensors of the model."""
        first, second = self.operations
        return {name: second([first(self.tensors[pattern]) for pattern in self.source_patterns])}


def _rename(
    name: str,
    renamings: list[WeightRenaming],
    converters: list[WeightConverter],
    prefix: str,
    known: dict[str, Any],
) -> tuple[str, str | None]:
    for each in renamings:
        name = name.replace(each.source, each.target)
    for converter in converters:
        for pattern in converter.source_patterns:
            if re.fullmatch(pattern, name):
                return converter.target, pattern
    longer = f"{prefix}.{name}"
    return (name if known.get(longer) is None else longer), None


def _by_number(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def transformers_with(monkeypatch: pytest.MonkeyPatch, *rules: Any) -> None:
    """Have a transformers, made up here, whose models are loaded by these rules."""
    for name, members in {
        "modeling_utils": {"PreTrainedModel": PreTrainedModel},
        "conversion_mapping": {"get_model_conversion_mapping": lambda model: rules},
        "core_model_loading": {
            "WeightRenaming": WeightRenaming,
            "WeightConverter": WeightConverter,
            "rename_source_key": _rename,
            "dot_natural_key": _by_number,
        },
    }.items():
        module = types.ModuleType(f"transformers.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_names_that_transformers_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of transformers finds its tensors under the names that `from_pretrained` changes; made up here."""
    transformers_with(monkeypatch, WeightRenaming("embed_out", "head"), object())

    def make() -> nn.Module:
        return PreTrainedModel(OrderedDict(encoder=nn.Linear(3, 5), head=nn.Linear(5, 2)))

    expected = disturbed(make).state_dict()
    changed = {"encoder.": "", "head.": "embed_out."}
    state = {changed[f"{name.split('.')[0]}."] + name.split(".")[1]: value for name, value in expected.items()}
    torch.save(state, tmp_path / "a.bin")

    def rank(world: Collectives) -> None:
        model = load_pretrained(make, tmp_path / "a.bin", strict=True)
        same_values(model.state_dict(), expected)
        # Into a wrapper, too.
        same_values(load_pretrained(FSDP(make()), tmp_path / "a.bin", strict=True).state_dict(), expected)

    on_ranks(2, rank)


def test_two_names_that_transformers_changes_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two tensors of the files would be one of the model, every rank raises an error that names them."""
    transformers_with(monkeypatch, WeightRenaming("embed_out", "head"), WeightRenaming("lm_head", "head"))
    state = {f"{name}.weight": torch.ones(2, 5) for name in ("embed_out", "lm_head")}
    torch.save(state, tmp_path / "a.bin")

    def rank(world: Collectives) -> None:
        with pytest.raises(
            CheckpointError,
            match=r"both 'embed_out\.weight' and 'lm_head\.weight' to 'head\.weight'.*mapping=",
        ):
            load_pretrained(lambda: PreTrainedModel(OrderedDict(head=nn.Linear(5, 2))), tmp_path / "a.bin")

    on_ranks(2, rank)


class Experts(nn.Module):
    """Twelve experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(12, 6, 4))


def with_experts() -> nn.Module:
    """A model of transformers, as far as that is made up here, that has experts."""
    return PreTrainedModel(OrderedDict(experts=Experts(), head=nn.Linear(5, 2)))


def experts_in_files(tmp_path: Path) -> nn.Module:
    """Such a model, whose experts are in files one by one."""
    torch.manual_seed(0)
    model = with_experts()
    nn.init.normal_(model.experts.gate_up)
    state = model.state_dict()
    joined = state.pop("experts.gate_up")
    for number in range(12):
        gate, up = joined[number].chunk(2)
        state |= {f"experts.{number}.up": up.clone(), f"experts.{number}.gate": gate.clone()}
    torch.save(state, tmp_path / "a.bin")
    return model


PATTERNS = [r"experts\.\d+\.gate", r"experts\.\d+\.up"]


def test_experts_that_transformers_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is one tensor in memory and many in files is joined while it is read, in the order of numbers; no byte twice."""
    rule = WeightConverter(PATTERNS, "experts.gate_up", [torch.stack, lambda each: torch.cat(each, dim=1)])
    transformers_with(monkeypatch, rule)
    expected = experts_in_files(tmp_path)

    def rank(world: Collectives) -> int:
        model, report = load_pretrained(with_experts, tmp_path / "a.bin", strict=True, output_loading_info=True)
        same_values(model.state_dict(), expected.state_dict())
        assert report.nbytes == 4 * sum(p.numel() for p in expected.parameters())
        return report.nbytes_read

    assert sum(on_ranks(3, rank)) == 4 * sum(p.numel() for p in expected.parameters())
    assert rule.tensors == {}


@pytest.mark.parametrize("second", [lambda each: torch.transpose(each[0], 1, 2), lambda each: torch.zeros(12, 6, 4)])
def test_a_rule_of_transformers_that_transposes(
    second: Callable[[list[Any]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of which a rule makes more than joining and cutting are refused by name, with what to do."""
    rule = WeightConverter(PATTERNS, "experts.gate_up", [torch.stack, second])
    transformers_with(monkeypatch, rule)
    expected = experts_in_files(tmp_path)
    torch.save(expected.state_dict(), tmp_path / "b.bin")

    def rank(world: Collectives) -> None:
        with pytest.raises(CheckpointError, match=r"'experts\.0\.up'.*save the state_dict\(\) of the model"):
            load_pretrained(with_experts, tmp_path / "a.bin")
        model = load_pretrained(with_experts, tmp_path / "b.bin", strict=True)
        same_values(model.state_dict(), expected.state_dict())

    on_ranks(2, rank)
