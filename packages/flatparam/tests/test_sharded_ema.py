"""`ShardedEMA`: the average of a sharded model is, bit for bit, the one that torch keeps of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardedEMA, ShardingStrategy, fully_shard
from flatparam.command import main
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import ByteLedger, Collectives, FlatParamError, RecordingCollectives

from .models import Batch, Transformer, mlp, seeded
from .worlds import assert_same_state, inputs, node_groups, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")

LINEAR = ModuleWrapPolicy({nn.Linear})
DECAY = 0.9
STEPS = 4


def sharded(model: nn.Module, **arguments: Any) -> nn.Module:
    return FSDP(model, auto_wrap_policy=LINEAR, **arguments)


def in_place(model: nn.Module, **arguments: Any) -> nn.Module:
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, **arguments)
    return fully_shard(model, **arguments)


def change(model: nn.Module, step: int) -> None:
    """What a step of an optimizer does, the same to each element on every rank and in a whole model."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01).add_(0.01 * step)


def expected(make: Callable[[], nn.Module], *, use_buffers: bool = False, steps: int = STEPS) -> dict[str, Any]:
    """The state of torch's average of a model in one process."""
    model = seeded(make)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=use_buffers)
    for step in range(steps):
        change(model, step)
        disturb_buffers(model, step)
        averaged.update_parameters(model)
    return averaged.module.state_dict()


def disturb_buffers(model: nn.Module, step: int) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.3 * step)
        elif buffer.dtype is not torch.bool:
            buffer.add_(3)


def averaged(model: nn.Module, *, steps: int = STEPS, **arguments: Any) -> ShardedEMA:
    ema = ShardedEMA(model, DECAY, **arguments)
    for step in range(steps):
        change(model, step)
        disturb_buffers(model, step)
        ema.update()
    return ema


def cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in state.items()}


@each_row("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
def test_the_bits_of_torchs_average(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """After several updates the averages of three ranks together are those of torch's `AveragedModel`, bit for bit."""

    def rank(world: Collectives) -> Any:
        model = sharded(seeded(mlp), sharding_strategy=strategy, use_orig_params=use_orig_params)
        ema = averaged(model)
        return ema.state_dict()

    for state in on_ranks(3, rank):
        assert state["updates"] == STEPS
        assert_same_state(state["averages"], expected(mlp))


def test_the_bits_with_fully_shard() -> None:
    """Modules that `fully_shard` has sharded are averaged to the same bits."""

    def rank(world: Collectives) -> Any:
        model = in_place(seeded(mlp))
        ema = averaged(model)
        with ema.applied(model):
            return cloned(model.state_dict())

    for state in on_ranks(2, rank):
        assert_same_state(state, expected(mlp))


def test_the_bits_in_a_hybrid(use_orig_params: bool) -> None:
    """Each copy of a shard is averaged by itself, and all stay equal."""

    def rank(world: Collectives) -> Any:
        model = sharded(
            seeded(mlp),
            process_group=node_groups(world),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=use_orig_params,
        )
        return averaged(model).state_dict()["averages"]

    for state in on_ranks(4, rank):
        assert_same_state(state, expected(mlp))


@pytest.mark.parametrize("use_buffers", [False, True])
def test_buffers(use_buffers: bool, use_orig_params: bool) -> None:
    """Buffers are copied at each update or averaged, as `AveragedModel` does by the same argument."""

    def rank(world: Collectives) -> Any:
        model = sharded(seeded(Batch), use_orig_params=use_orig_params)
        return averaged(model, use_buffers=use_buffers).state_dict()["averages"]

    for state in on_ranks(2, rank):
        assert_same_state(state, expected(Batch, use_buffers=use_buffers))


def test_parameters_that_are_whole(use_orig_params: bool) -> None:
    """Ignored parameters, tied ones and a model that is not sharded at all have the same averages."""

    def rank(world: Collectives) -> Any:
        model = seeded(Transformer)
        ignored = [model.extras, model.blocks[0].norm]
        model = FSDP(model, ignored_modules=ignored, use_orig_params=use_orig_params)
        ema = averaged(model)
        with ema.applied(model):
            return cloned(model.state_dict())

    whole = averaged(seeded(Transformer)).state_dict()["averages"]
    assert_same_state(whole, expected(Transformer))
    for state in on_ranks(2, rank):
        assert_same_state(state, expected(Transformer))


def test_no_bytes_are_communicated(use_orig_params: bool) -> None:
    """To begin, to update and to apply an average calls no collective."""

    def rank(world: Collectives) -> None:
        ledger = ByteLedger()
        recorded = RecordingCollectives(world, ledger)
        model = sharded(seeded(mlp), process_group=recorded, use_orig_params=use_orig_params)
        ema = averaged(model)
        with ema.applied(model):
            pass
        assert ledger.by_op() == {}
        model(inputs(world.rank)[0])
        assert ledger.payload_nbytes > 0

    on_ranks(2, rank)


class Calls(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_one_call_for_each_dtype(use_orig_params: bool) -> None:
    """An update is one call of `_foreach_lerp_` for each dtype, whatever the number of units."""

    def rank(world: Collectives) -> None:
        model = seeded(mlp)
        model[4].double()
        model = sharded(model, use_orig_params=use_orig_params)
        ema = averaged(model, steps=1)
        with Calls() as calls:
            ema.update()
        assert [name for name in calls.names if "lerp" in name] == ["_foreach_lerp_"] * 2
        assert not [name for name in calls.names if "copy" in name or "clone" in name]

    on_ranks(2, rank)


def test_applied_uses_the_memory_of_the_averages(use_orig_params: bool) -> None:
    """Inside, each shard is the memory of its average, and afterwards its own: same addresses, same bits, same gradients."""

    def rank(world: Collectives) -> None:
        model = sharded(seeded(mlp), use_orig_params=use_orig_params)
        ema = averaged(model)
        model(inputs(world.rank)[0]).square().mean().backward()
        before = [(p, p.data_ptr(), p.detach().clone(), p.grad) for p in model.parameters()]
        addresses = {average.values.data_ptr() for average in ema._averages}
        with ema.applied(model):
            flat = {handle.flat_param.data_ptr() for unit in units_of(model) for handle in unit.handles}
            assert flat == addresses
            assert all(p.grad is None for p in model.parameters())
            model(inputs(world.rank)[0]).sum().backward()
        for parameter, address, values, gradient in before:
            assert parameter.data_ptr() == address
            assert torch.equal(parameter, values)
            assert parameter.grad is gradient

    on_ranks(2, rank)


def test_accumulated_gradients_of_an_early_optimizer(use_orig_params: bool) -> None:
    """Gradients that accumulate over `applied` are stepped with, also by an optimizer that was made before sharding."""

    def rank(world: Collectives, applies: bool) -> Any:
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = sharded(model, use_orig_params=use_orig_params)
        ema = averaged(model)
        for x in inputs(world.rank, 2):
            model(x).square().mean().backward()
            if applies:
                with ema.applied(model):
                    model(x).sum().backward()
        optimizer.step()
        return model.state_dict()

    for found, twin in zip(on_ranks(2, rank, True), on_ranks(2, rank, False), strict=True):
        assert_same_state(found, twin)


def units_of(model: nn.Module) -> Any:
    return [wrapper._unit for wrapper in FSDP.fsdp_modules(model)]


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_inside_and_one_after_it(strategy: ShardingStrategy, fails: bool, use_orig_params: bool) -> None:
    """A pass inside computes with the averages, one afterwards with the parameters, also after an exception in between.

    Full parameters that a strategy keeps are gathered anew.
    """
    average = seeded(mlp)
    average.load_state_dict(expected(mlp))
    own = seeded(mlp)
    for step in range(STEPS):
        change(own, step)

    def rank(world: Collectives) -> None:
        model = sharded(seeded(mlp), sharding_strategy=strategy, use_orig_params=use_orig_params)
        ema = averaged(model)
        x = inputs(world.rank)[0]
        loss = model(x).sum()  # full parameters are kept for the backward pass
        try:
            with ema.applied(model):
                assert torch.equal(model(x), average(x))
                if fails:
                    handle = model.module[2].register_forward_hook(interrupt)
                    try:
                        model(x)
                    finally:
                        handle.remove()
        except KeyError:
            assert fails
        assert torch.equal(model(x), own(x))
        del loss

    on_ranks(2, rank)


def interrupt(*_: Any) -> None:
    raise KeyError("a hook of the user's")


def test_mixed_precision(use_orig_params: bool) -> None:
    """With a compute dtype of 16 bits the averages are of the shards, which have 32."""

    def rank(world: Collectives) -> Any:
        model = sharded(
            seeded(mlp),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            use_orig_params=use_orig_params,
        )
        ema = averaged(model)
        with ema.applied(model):
            assert model(inputs(world.rank)[0]).dtype == torch.bfloat16
        return ema.state_dict()["averages"]

    for state in on_ranks(2, rank):
        assert_same_state(state, expected(mlp))


def test_a_dtype_of_its_own(use_orig_params: bool) -> None:
    """Averages in fp32 of a model in bf16 are those of its values in fp32; the model computes with them in bf16."""
    whole = seeded(mlp).bfloat16()
    twin = AveragedModel(seeded(mlp), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        change(whole, step)
        as_float = seeded(mlp)
        as_float.load_state_dict(whole.state_dict())
        twin.update_parameters(as_float)
    rounded = seeded(mlp).bfloat16()
    rounded.load_state_dict(twin.module.state_dict())

    def rank(world: Collectives) -> Any:
        model = sharded(seeded(mlp).bfloat16(), use_orig_params=use_orig_params)
        ema = averaged(model, dtype=torch.float32)
        assert ema.nbytes == 2 * sum(h.flat_param.nbytes for unit in units_of(model) for h in unit.handles)
        x = inputs(world.rank)[0].bfloat16()
        before = cloned(model.state_dict())
        model(x).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        with ema.applied(model):
            assert torch.equal(model(x), rounded(x))
        state = ema.state_dict()["averages"]
        assert_same_state(model.state_dict(), before)
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
        ema.load_state_dict({"averages": {name: value * 2 for name, value in state.items()}, "updates": 1})
        assert_same_state(model.state_dict(), before)
        return state, ema.state_dict()["averages"]

    for state, doubled in on_ranks(2, rank):
        assert_same_state(state, twin.module.state_dict())
        assert_same_state(doubled, {name: value * 2 for name, value in state.items()})


def test_state_at_a_different_number_of_ranks(use_orig_params: bool) -> None:
    """A state goes on to the same bits at a different number of ranks, with the other exposure."""

    def first(world: Collectives) -> Any:
        return averaged(sharded(seeded(mlp), use_orig_params=use_orig_params), steps=2).state_dict()

    def second(world: Collectives, state: Any) -> Any:
        model = sharded(seeded(mlp), use_orig_params=not use_orig_params)
        for step in range(2):
            change(model, step)
        ema = ShardedEMA(model, DECAY)
        ema.load_state_dict(state)
        for step in range(2, STEPS):
            change(model, step)
            ema.update()
        return ema.state_dict()

    for state in on_ranks(3, second, on_ranks(2, first)[0]):
        assert state["updates"] == STEPS
        assert_same_state(state["averages"], expected(mlp))


def test_no_checkpoint_of_a_model_that_shows_its_averages(tmp_path: Path) -> None:
    """It would have the averages as the model's own parameters, which would be lost; nothing is written or loaded."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer
    CheckpointError = pytest.importorskip("flatparam_files").CheckpointError

    def save(world: Collectives) -> None:
        model = sharded(seeded(Batch))
        ema = averaged(model, steps=2)
        own = model.state_dict()
        with Checkpointer(tmp_path, model, averages=ema, ranks=world) as checkpointer:
            with ema.applied(model):
                for deed, act in (("saved", lambda: checkpointer.save(1)), ("loaded", checkpointer.load)):
                    with pytest.raises(CheckpointError, match=f"cannot be {deed}.*applied"):
                        act()
                with pytest.warns(UserWarning, match="no last checkpoint was saved: .*shows its averages"):
                    assert checkpointer.save_last(1) is None
            assert checkpointer.steps() == []
            checkpointer.save(2)
            change(model, 3)
            assert checkpointer.load() is not None
        assert_same_state(model.state_dict(), own)

    on_ranks(2, save)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_in_a_checkpoint(tmp_path: Path, dtype: torch.dtype | None, use_orig_params: bool) -> None:
    """A checkpoint of two ranks has the averages, piece by piece; three ranks go on from it to the same bits."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer
    open_checkpoint = pytest.importorskip("flatparam_files").open_checkpoint

    def save(world: Collectives) -> None:
        model = sharded(seeded(Batch), use_orig_params=use_orig_params)
        ema = averaged(model, steps=2, dtype=dtype)
        with Checkpointer(tmp_path, model, averages={"slow": ema}, ranks=world) as checkpointer:
            checkpointer.save(2)

    def load(world: Collectives) -> Any:
        model = sharded(seeded(Batch, 8), use_orig_params=not use_orig_params)
        ema = ShardedEMA(model, DECAY, dtype)
        loaded = Checkpointer(tmp_path, model, averages={"slow": ema}, ranks=world).load()
        assert loaded is not None
        for step in range(2, STEPS):
            change(model, step)
            disturb_buffers(model, step)
            ema.update()
        return ema.state_dict()

    on_ranks(2, save)
    with open_checkpoint(tmp_path / "step-00000002") as checkpoint:
        records = [r for path, r in checkpoint.manifest.tensors.items() if path.startswith("averages/slow/model/")]
        weights = [record for record in records if record.info.shape == (4, 3)]
        assert [len(record.pieces) for record in weights] == [2]
        assert weights[0].info.dtype == (dtype or torch.float32)
    for state in on_ranks(3, load):
        assert state["updates"] == STEPS
        if dtype is None:
            assert_same_state(state["averages"], expected(Batch))
        else:
            assert state["averages"]["first.weight"].dtype == dtype


def test_a_checkpoint_that_was_rewritten(tmp_path: Path) -> None:
    """Written anew for three ranks without a process group, a checkpoint still has the averages, bit for bit."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer
    open_source = pytest.importorskip("flatparam_files").open_source
    write_checkpoint = pytest.importorskip("flatparam_files").write_checkpoint

    def save(world: Collectives) -> None:
        model = sharded(seeded(mlp))
        Checkpointer(tmp_path / "a", model, averages=averaged(model), ranks=world).save(2)

    def load(world: Collectives) -> Any:
        model = sharded(seeded(mlp, 8))
        ema = ShardedEMA(model, DECAY)
        Checkpointer(tmp_path / "b", model, averages=ema, ranks=world).load()
        return ema.state_dict()

    on_ranks(2, save)
    write_checkpoint(open_source(tmp_path / "a"), tmp_path / "b", world_size=3, step=2)
    for state in on_ranks(2, load):
        assert state["updates"] == STEPS
        assert_same_state(state["averages"], expected(mlp))


def test_an_export_from_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`flatparam ckpt export --averages` writes the averages as a model for `from_pretrained`, without any rank."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def save(world: Collectives) -> None:
        model = sharded(seeded(mlp))
        Checkpointer(tmp_path / "run", model, averages={"slow": averaged(model)}, ranks=world).save(2)

    def export(*arguments: str) -> int:
        return main(["ckpt", "export", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf", *arguments])

    on_ranks(2, save)
    assert export("--averages") == export("--averages", "quick") == 2
    assert capsys.readouterr().err.count("it has those named 'slow'") == 2
    assert export("--averages", "slow") == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same_state(dict(sorted(found.items())), dict(sorted(expected(mlp).items())))


def test_a_checkpoint_without_averages(tmp_path: Path) -> None:
    """It is refused by name on every rank; with `strict=False` the next update begins the averages anew."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer
    CheckpointError = pytest.importorskip("flatparam_files").CheckpointError

    def rank(world: Collectives) -> None:
        model = sharded(seeded(mlp))
        Checkpointer(tmp_path, model, ranks=world).save(1)
        change(model, 5)
        ema = ShardedEMA(model, DECAY)
        checkpointer = Checkpointer(tmp_path, model, averages=ema, ranks=world)
        before = cloned(model.state_dict())
        with pytest.raises(CheckpointError, match="has no averages at 'averages'.*strict=False"):
            checkpointer.load()
        assert_same_state(model.state_dict(), before)
        checkpointer.load(strict=False)
        ema.update()
        assert_same_state(ema.state_dict()["averages"], seeded(mlp).state_dict())

    on_ranks(2, rank)


def test_steps_inside_are_refused(use_orig_params: bool) -> None:
    """An optimizer of the model cannot step while it shows the averages, and another model's can."""

    def rank(world: Collectives) -> None:
        model = sharded(seeded(mlp), use_orig_params=use_orig_params)
        other = nn.Linear(2, 2)
        steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
        ema = averaged(model)
        with ema.applied(model):
            steps[1].step()
            with pytest.raises(FlatParamError, match=r"SGD\.step\(\): the model shows its averages"):
                steps[0].step()
        steps[0].step()

    on_ranks(2, rank)


def test_misuse_is_refused() -> None:
    """Each wrong call says what was expected, and changes nothing."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def rank(world: Collectives) -> None:
        model = sharded(seeded(mlp))
        ema = averaged(model)
        with pytest.raises(ValueError, match="a decay from 0 to 1, found 1.5"):
            ema.decay = 1.5
        with pytest.raises(ValueError, match="a decay from 0 to 1, found '0.9'"):
            ema.decay = "0.9"
        with pytest.raises(ValueError, match=r"at least 16 bits, found torch\.int64"):
            ShardedEMA(model, DECAY, torch.int64)
        with pytest.raises(ValueError, match="found a different Sequential"), ema.applied(model.module):
            pass
        with pytest.raises(ValueError, match="expected the keys 'averages' and 'updates', found .'0.bias'"):
            ema.load_state_dict(model.state_dict())
        state = ema.state_dict()
        kept = {name: value.clone() for name, value in state["averages"].items()}
        doubled = {name: value * 2 for name, value in kept.items()}
        with pytest.raises(ValueError, match="a number of updates of at least 0, found -1"):
            ema.load_state_dict({"averages": doubled, "updates": -1})
        with pytest.raises(RuntimeError):
            ema.load_state_dict({"averages": {}, "updates": 7})
        after = ema.state_dict()
        assert after["updates"] == state["updates"]
        assert all(torch.equal(after["averages"][name], value) for name, value in kept.items())
        with ema.applied(model):
            with pytest.raises(FlatParamError, match=r"leave applied\(model\) first"):
                ema.update()
            with pytest.raises(FlatParamError, match="shows its averages already"), ema.applied(model):
                pass
        with FSDP.summon_full_params(model):
            with pytest.raises(FlatParamError, match="full parameters are summoned"):
                ema.update()
            with pytest.raises(FlatParamError, match="full parameters are summoned"), ema.applied(model):
                pass
        with pytest.raises(ValueError, match="averages of the model that is saved"):
            Checkpointer("somewhere", sharded(seeded(mlp)), averages=ema, ranks=world)
        assert ema.updates == STEPS
        assert_same_state(ema.state_dict()["averages"], expected(mlp))

    on_ranks(2, rank)


def test_sharded_after_the_average_was_begun(use_orig_params: bool) -> None:
    """A model that was sharded too late is refused with the name of what is not there any more."""

    def rank(world: Collectives) -> None:
        model = seeded(mlp)
        ema = ShardedEMA(model, DECAY)
        sharded(model, use_orig_params=use_orig_params)
        with pytest.raises(FlatParamError, match=r"'0\.weight'.*make"):
            ema.update()

    on_ranks(2, rank)
