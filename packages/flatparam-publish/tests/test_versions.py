"""Versions in a mailbox: whole, bit for bit, in as many bytes as the formula says, for receivers who come and go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives
from flatparam_comm.testing import rectangle, run_threads
from flatparam_publish import GroupChannel, Mailbox, Publisher, PublishError, Receiver, Slicing, publish
from flatparam_runtime import UnitPlan, shard_module
from flatparam_state.model_tensors import model_tensors

from .beneath import CASES, mlp, shard, shard_case
from .sample import assert_equal, bits, change, expected
from .test_encoding import formula

HALF = torch.bfloat16


def stale(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model of the same kind with different values."""
    return {name: torch.zeros_like(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [None, HALF], ids=["own", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_every_version_is_the_model(name: str, dtype: Any, use_orig_params: bool, tmp_path: Path) -> None:
    """Whatever the units, dtypes and memory orders, a dict has the bits of the model after each version."""

    def program(ranks: Collectives, folder: Path) -> None:
        model = shard_case(CASES[name], ranks, use_orig_params=use_orig_params)
        publisher = Publisher(model, Mailbox(folder), dtype=dtype)
        received: dict[str, Tensor] = {}
        receiver = Receiver(received, Mailbox(folder))
        assert not receiver.receive()
        for step in range(4):
            published = publisher.publish()
            assert published.is_dense == (step == 0)
            assert receiver.receive()
            assert (receiver.version, publisher.version, published.version) == (step + 1,) * 3
            assert not receiver.receive()
            assert_equal(received, expected(model, dtype))
            change(model, step)

    for world_size in (1, 3):
        run_threads(world_size, program, tmp_path / str(world_size))


@each_row(
    "different",
    [
        lambda rank: {"dtype": HALF if rank else torch.float16},
        lambda rank: {"dtype": HALF if rank else None},
        lambda rank: {"only": (lambda name: name.endswith("bias")) if rank else None},
        lambda rank: {"names": lambda name: f"{name}{rank}"},
    ],
    ids=["dtypes", "a dtype", "only", "names"],
)
def test_ranks_that_would_publish_different_tensors(different: Any, tmp_path: Path) -> None:
    """Every rank raises, and names one of them; receivers get nothing, and the same arguments publish afterwards."""

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, use_orig_params=True)
        with pytest.raises(PublishError, match="rank 1 publishes other names, shapes or dtypes .* on every rank"):
            publish(model, Mailbox(tmp_path), **different(ranks.rank))
        received: dict[str, Tensor] = {}
        assert not Receiver(received, Mailbox(tmp_path)).receive()
        publish(model, Mailbox(tmp_path))
        assert Receiver(received, Mailbox(tmp_path)).receive()
        assert_equal(received, expected(model))

    run_threads(2, program)


@each_row("through", ["mailbox", "function"])
def test_some_tensors_alone(through: str, use_orig_params: bool, tmp_path: Path) -> None:
    """Only what `only` accepts is sent; a module keeps the rest if it is told so, and is refused otherwise."""

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, use_orig_params=use_orig_params)
        wanted = expected(model)
        target = mlp()
        target.load_state_dict(stale(target))
        chosen = {name for name in wanted if name.endswith("bias")}
        if through == "function":
            given: dict[str, Tensor] = {}
            publish(model, given.__setitem__, only=lambda name: name in chosen, every_rank=True)
            assert_equal(given, {name: wanted[name] for name in chosen})
            return
        publisher = Publisher(model, Mailbox(tmp_path), only=lambda name: name in chosen)
        published = publisher.publish()
        if ranks.rank == 0:
            assert published.dense_nbytes == sum(wanted[name].nbytes for name in chosen)
            with pytest.raises(PublishError, match="the publication lacks '.*weight'.*strict="):
                Receiver(target, Mailbox(tmp_path)).receive()
            assert Receiver(target, Mailbox(tmp_path), strict=False).receive()
            for name, value in target.state_dict().items():
                assert torch.equal(value, wanted[name] if name in chosen else torch.zeros_like(value)), name
        with pytest.raises(ValueError, match="found that it accepts none"):
            Publisher(model, Mailbox(tmp_path), only=lambda name: False)

    run_threads(2, program)


def test_into_modules(tmp_path: Path) -> None:
    """A plain module gets the values too, also one that holds bf16 numbers in fp32, or ties less than the model."""

    def program(ranks: Collectives) -> None:
        model = shard_case(CASES["tied"], ranks)
        publisher = Publisher(model, Mailbox(tmp_path), dtype=HALF)
        untied = CASES["tied"].build(3)
        untied.head.weight = nn.Parameter(torch.zeros(7, 3))  # type: ignore[union-attr,arg-type]
        modules = [CASES["tied"].build(1), CASES["tied"].build(2).to(HALF), untied]
        receivers = [Receiver(module, Mailbox(tmp_path)) for module in modules]
        for step in range(3):
            publisher.publish()
            wanted = expected(model, HALF)
            for module, receiver in zip(modules, receivers, strict=True):
                receiver.receive()
                for key, value in module.state_dict().items():
                    assert torch.equal(value, wanted["embed.weight" if "head" in key else key].to(value.dtype))
            change(model, step)
        assert modules[0].head.weight is modules[0].embed.weight

    run_threads(2, program)


def test_memory_orders_of_modules(tmp_path: Path) -> None:
    """A module may keep its elements in a different order than the trainer does."""

    def program(ranks: Collectives) -> None:
        model = shard_case(CASES["odd shapes"], ranks)
        publisher = Publisher(model, Mailbox(tmp_path))
        plain = CASES["odd shapes"].build(1).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        plain.transposed = nn.Parameter(torch.zeros(3, 4))
        receiver = Receiver(plain, Mailbox(tmp_path))
        for step in range(3):
            publisher.publish()
            receiver.receive()
            assert_equal(plain.state_dict(), expected(model))
            change(model, step)

    run_threads(2, program)


def test_what_does_not_fit(tmp_path: Path) -> None:
    """A module that lacks a tensor, has more, or cannot hold the numbers is not changed, and the error says why."""
    publish(mlp(), Mailbox(tmp_path))
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 8), nn.Linear(1, 1))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    receiver = Receiver(other, Mailbox(tmp_path))
    with pytest.raises(PublishError) as raised:
        receiver.receive()
    for part in (
        "'2.weight': published with shape (7, 5), found (8, 5)",
        "the module lacks '4.weight'",
        "the publication lacks '3.weight'",
    ):
        assert part in str(raised.value)
    assert receiver.version == 0
    assert_equal(other.state_dict(), before)
    with pytest.raises(PublishError, match=r"torch.float32, which torch.bfloat16 cannot hold exactly"):
        Receiver(mlp().to(HALF), Mailbox(tmp_path)).receive()

    def program(ranks: Collectives) -> None:
        with pytest.raises(ValueError, match="expected a plain module, found a Sequential that is sharded"):
            Receiver(shard(mlp(), ranks), Mailbox(tmp_path))

    run_threads(2, program)


def changed(model: nn.Module, snapshot: list[bytes]) -> int:
    """The bytes that this rank's packet has by the formula, from the bits of each fragment before and now."""
    nbytes = 0
    for tensor, before in zip(model_tensors(model), snapshot, strict=True):
        now = bits(tensor.local.to(HALF))
        pairs = zip(memoryview(before).cast("h"), memoryview(now).cast("h"), strict=True)
        steps = [(at, new - old) for at, (old, new) in enumerate(pairs) if new != old]
        exceptions = [number for number, (_, by) in enumerate(steps) if abs(by) != 1]
        if steps:
            delta = formula([at for at, _ in steps], exceptions, 2)
            nbytes += min(delta, 32 + len(now))
    return nbytes


@each_row("size", [1e-5, 1e-3, 0.5])
def test_bytes_on_the_wire(size: float, tmp_path: Path) -> None:
    """A version has the bytes of the formula in its changed elements, and no rank communicates any of the model."""

    def program(ranks: Collectives) -> tuple[Any, int]:
        ledger = ByteLedger()
        model = shard(nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 9)), RecordingCollectives(ranks, ledger))
        publisher = Publisher(model, Mailbox(tmp_path), dtype=HALF)
        publisher.publish()
        snapshot = [bits(tensor.local.to(HALF)) for tensor in model_tensors(model)]
        change(model, 1, size)
        published = publisher.publish()
        assert ledger.total.count == 0
        return published, changed(model, snapshot)

    results = run_threads(2, program)
    numel = 40 * 50 + 50 + 50 * 9 + 9
    for published, _ in results:
        assert published.nbytes == sum(nbytes for _, nbytes in results)
        assert published.dense_nbytes == 2 * numel
    found = results[0][0]
    assert found.nbytes <= found.dense_nbytes + 2 * 32 * 4
    if size == 1e-5:
        assert found.nbytes * 50 < found.dense_nbytes


def test_nothing_has_changed(tmp_path: Path) -> None:
    """A version without a change has no bytes, and is a version all the same."""
    model = mlp()
    publisher = Publisher(model, Mailbox(tmp_path))
    receiver = Receiver({}, Mailbox(tmp_path))
    publisher.publish()
    receiver.receive()
    assert publisher.publish().nbytes == 0
    assert receiver.receive()
    assert receiver.version == 2


@each_row("bucket", [1, 7, 50])
def test_buckets(bucket: int, tmp_path: Path) -> None:
    """Looking at few elements at a time gives more records, and the same version."""

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks)
        publisher = Publisher(model, Mailbox(tmp_path), bucket=bucket)
        received: dict[str, Tensor] = {}
        receiver = Receiver(received, Mailbox(tmp_path))
        for step in range(3):
            publisher.publish()
            receiver.receive()
            assert_equal(received, expected(model))
            change(model, step)

    run_threads(2, program)


def test_copies_share_the_work(tmp_path: Path) -> None:
    """Of ranks that hold copies of a shard each sends some tensors, and all together send each once."""

    def program(ranks: Collectives) -> list[int]:
        model = mlp()
        shard_module(model, UnitPlan(rectangle(ranks, 2), True, True))
        publisher = Publisher(model, Mailbox(tmp_path))
        received: dict[str, Tensor] = {}
        receiver = Receiver(received, Mailbox(tmp_path))
        for step in range(3):
            published = publisher.publish()
            receiver.receive()
            assert_equal(received, expected(model))
            change(model, step)
        assert published.nbytes < published.dense_nbytes + 32 * 12
        return [each.local.numel() for each in publisher._shards]

    shares = run_threads(4, program)
    assert [sum(column) for column in zip(*shares, strict=True)] == [15, 5, 35, 7, 7, 1]
    assert all(any(share) for share in shares)


def test_slices(tmp_path: Path) -> None:
    """Receivers with tensor parallelism get their own parts of each tensor, in any memory order, and no others."""
    slicing = Slicing(2, {"transposed": 0, "conv.weight": 1, "*.bias": 0, "wide": -1})

    def make() -> nn.Module:
        model = CASES["odd shapes"].build()
        model.conv = nn.Conv2d(4, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.transposed = nn.Parameter(torch.randn(3, 4).t())
        model.wide = nn.Parameter(torch.randn(3, 6))
        return model

    def sliced(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
        dims = {"transposed": 0, "conv.weight": 1, "conv.bias": 0, "wide": 1}
        return {name: value.chunk(2, dims[name])[rank] if name in dims else value for name, value in tensors.items()}

    def program(ranks: Collectives) -> None:
        model = shard(make(), ranks, ("conv", ""))
        publisher = Publisher(model, Mailbox(tmp_path, slicing=slicing))
        received: list[dict[str, Tensor]] = [{}, {}]
        receivers = [
            Receiver(tensors, Mailbox(tmp_path, slicing=slicing), part=part) for part, tensors in enumerate(received)
        ]
        for step in range(4):
            published = publisher.publish()
            wanted = expected(model)
            own = dict.fromkeys(range(2))
            for part, receiver in enumerate(receivers):
                assert receiver.receive()
                own[part] = sliced(wanted, part)
                assert_equal(received[part], own[part])
                given: dict[str, Tensor] = {}
                publish(model, slicing.sink(part, given.__setitem__), every_rank=True)
                assert_equal(given, own[part])
            assert published.dense_nbytes == sum(v.nbytes for part in own.values() for v in part.values())
            change(model, step)

    run_threads(3, program)


def test_receivers_that_cut_in_a_different_way(tmp_path: Path) -> None:
    """A receiver whose slicing has as many parts of different dimensions would mix up elements, and is refused by name."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    publish(model, Mailbox(tmp_path, slicing=Slicing(2, {"*.weight": 0})))
    for dims, message in [
        (
            {"*.weight": 1},
            "cuts dimension 0 of '0.weight', and the slicing of this receiver cuts dimension 1 of",
        ),
        ({"0.weight": 0}, "cuts dimension 0 of '1.weight', and the slicing of this receiver does not cut"),
        ({"*": 0}, "does not cut '0.bias', and the slicing of this receiver cuts dimension 0 of"),
    ]:
        found: dict[str, torch.Tensor] = {}
        with pytest.raises(PublishError, match=message):
            Receiver(found, Mailbox(tmp_path, slicing=Slicing(2, dims)), part=1).receive()
        assert not found

    def rank(world: Collectives) -> str:
        dims = {"*.weight": 0 if world.rank == 0 else 1}
        channel = GroupChannel(world, receivers=[1, 2], slicing=Slicing(2, dims))
        act = Publisher(model, channel).publish if world.rank == 0 else Receiver({}, channel).receive
        with pytest.raises(PublishError, match=r"rank 1: .*cuts dimension 0 of '0.weight'"):
            act()
        return "told"

    assert run_threads(3, rank) == ["told"] * 3


def test_slices_that_do_not_fit(tmp_path: Path) -> None:
    """A dimension that does not exist, or cannot be cut in equal parts, is refused by name before anything is sent."""
    for dims, message in [
        ({"0.bias": 1}, r"'0.bias' of shape \(5,\) has no dimension 1, which '0.bias' cuts"),
        ({"0.*": 0}, "'0.weight' has 5 indices in dimension 0, expected a multiple of the 2 ranks"),
    ]:
        with pytest.raises(ValueError, match=message):
            Publisher(mlp(), Mailbox(tmp_path, slicing=Slicing(2, dims)))
    with pytest.raises(ValueError, match="at least 1, found 0"):
        Slicing(0)
    publish(mlp(), Mailbox(tmp_path, slicing=Slicing(2)))
    with pytest.raises(PublishError, match="expected a part from 0 to 1, .* found 2"):
        Receiver({}, Mailbox(tmp_path, slicing=Slicing(2)), part=2).receive()
    with pytest.raises(PublishError, match=r"found None: pass Receiver\(part=\)"):
        Receiver({}, Mailbox(tmp_path, slicing=Slicing(2))).receive()
    with pytest.raises(PublishError, match="the publisher's slicing has 2 parts, and this one 1"):
        Receiver({}, Mailbox(tmp_path)).receive()


# Receivers and publishers that come and go


def test_receivers_come_and_go(tmp_path: Path) -> None:
    """A receiver that starts late, or was away, has the newest version at once; the folder has at most two bases."""
    model = nn.Linear(60, 60)
    publisher = Publisher(model, Mailbox(tmp_path))
    always, sometimes = {}, {}
    receivers = Receiver(always, Mailbox(tmp_path)), Receiver(sometimes, Mailbox(tmp_path))
    most = dense = 0
    for step in range(40):
        published = publisher.publish()
        assert published.is_dense == (step == 0)
        dense = published.dense_nbytes
        most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
        receivers[0].receive()
        assert_equal(always, model.state_dict())
        if step % 7 == 0:
            receivers[1].receive()
            assert_equal(sometimes, model.state_dict())
        late: dict[str, Tensor] = {}
        newcomer = Receiver(late, Mailbox(tmp_path))
        newcomer.receive()
        assert newcomer.version_id == receivers[0].version_id
        assert_equal(late, model.state_dict())
        change(model, step)
    tree = json.loads((tmp_path / "latest.json").read_text())["content"]
    assert tree["base"]["version"][1] > 1, "the base was renewed"
    assert most < 2.6 * dense


def test_a_publisher_that_starts_again(tmp_path: Path) -> None:
    """A new publisher sends all values, and goes on with the numbers; so does one whose folder was cleared."""
    model = mlp()
    received: dict[str, Tensor] = {}
    receiver = Receiver(received, Mailbox(tmp_path))
    for _ in range(2):
        publisher = Publisher(model, Mailbox(tmp_path))
        for step in range(2):
            assert publisher.publish().is_dense == (step == 0)
            receiver.receive()
            assert_equal(received, model.state_dict())
            change(model, step)
    assert receiver.version == 4
    publisher._channel.clear()  # type: ignore[attr-defined]
    assert not tmp_path.exists()
    assert not receiver.receive()
    assert publisher.publish().is_dense
    assert receiver.receive()
    assert receiver.version == 5
    assert_equal(received, model.state_dict())


def test_a_model_that_becomes_a_different_one(tmp_path: Path) -> None:
    """If its dtypes change between two versions, all values are sent, and a dict follows."""
    model = mlp()
    publisher, received = Publisher(model, Mailbox(tmp_path)), {}
    receiver = Receiver(received, Mailbox(tmp_path))
    for each in (model, model.double(), model):
        published = publisher.publish()
        receiver.receive()
        assert_equal(received, each.state_dict())
    assert not published.is_dense


def test_changes_of_a_version_that_was_not_delivered(tmp_path: Path) -> None:
    """What a failed version had found is forgotten, also if the next version sends all values and changes follow."""
    broken = set()

    class Full(Mailbox):  # type: ignore[misc]  # it is final
        def _write(self, *args: Any) -> Any:
            packets = super()._write(*args)
            if broken:
                raise OSError("no space left")
            return packets

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks)
        box = Full(tmp_path)
        publisher = Publisher(model, box, dtype=HALF)
        received: dict[str, Tensor] = {}
        receiver = Receiver(received, Mailbox(tmp_path))
        publisher.publish()
        change(model, 1, 4e-3)
        ranks.barrier()
        broken.add(True)
        with pytest.raises(PublishError, match="no space left"):
            publisher.publish()
        ranks.barrier()
        broken.clear()
        box.clear()
        ranks.barrier()
        for step in (2, 3, 4):
            change(model, step, 4e-3)
            assert publisher.publish().is_dense == (step == 2)
            assert receiver.receive()
            assert_equal(received, expected(model, HALF))
            ranks.barrier()

    run_threads(2, program)


def test_a_rank_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one rank cannot write, every rank raises, receivers keep what they have, and the next version is whole."""
    broken = set()

    class Full(Mailbox):  # type: ignore[misc]  # it is final
        def _write(self, *args: Any) -> Any:
            if broken:
                raise OSError("no space left")
            return super()._write(*args)

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks)
        box = Full(tmp_path) if ranks.rank == 1 else Mailbox(tmp_path)
        publisher = Publisher(model, box)
        received: dict[str, Tensor] = {}
        receiver = Receiver(received, Mailbox(tmp_path))
        publisher.publish()
        receiver.receive()
        before = expected(model)
        change(model, 1)
        ranks.barrier()
        broken.add(True)
        with pytest.raises(PublishError, match="rank 1: OSError: no space left"):
            publisher.publish()
        assert not receiver.receive()
        assert_equal(received, before)
        ranks.barrier()
        broken.clear()
        assert not publisher.publish().is_dense
        assert receiver.receive()
        assert receiver.version == 2
        assert_equal(received, expected(model))

    run_threads(2, program)


def test_damaged_files(tmp_path: Path) -> None:
    """A file with a different bit is refused, and the receiver keeps its version; new values put it right."""
    model = mlp()
    publisher, received = Publisher(model, Mailbox(tmp_path)), {}
    receiver = Receiver(received, Mailbox(tmp_path))
    publisher.publish()
    receiver.receive()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for pattern in ("*-00000002-*", "*-catalogue*", "latest.json"):
        change(model, 1)
        publisher.publish()
        for path in tmp_path.glob(pattern):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        with pytest.raises(PublishError, match="damaged"):
            receiver.receive()
        assert receiver.version == 1
        assert_equal(received, before)
        Mailbox(tmp_path).clear()
    publisher.publish()
    receiver.receive()
    assert_equal(received, model.state_dict())


def test_an_interrupted_receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that was interrupted while it wrote says that it has no version, and then finishes it."""
    from flatparam_publish.receiver import Value

    model = mlp()
    publisher, received = Publisher(model, Mailbox(tmp_path)), {}
    receiver = Receiver(received, Mailbox(tmp_path))
    publisher.publish()
    receiver.receive()
    change(model, 1)
    publisher.publish()
    write, calls = Value.write, []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Value, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            receiver.receive()
    assert (receiver.version, receiver.version_id) == (0, None)
    receiver.receive()
    assert receiver.version == 2
    assert_equal(received, model.state_dict())


def test_in_memory() -> None:
    """A mailbox in the memory of the host has a folder that only this user can use."""
    box = Mailbox.in_memory("test-of-flatparam")
    try:
        publish(mlp(), box)
        received: dict[str, Tensor] = {}
        assert Receiver(received, Mailbox.in_memory("test-of-flatparam")).receive()
        assert box.folder.stat().st_mode & 0o77 == 0
        assert len(received) == 6
    finally:
        box.clear()
    assert not box.folder.exists()
    with pytest.raises(ValueError, match="without '/'"):
        Mailbox.in_memory("../else")


@each_row(
    ("different", "words"),
    [
        (lambda rank: {"every_rank": rank == 1}, "every_rank is False on rank 0, True on rank 1"),
        (lambda rank: {"bucket": 2**20 + rank}, "bucket is 1048576 on rank 0, 1048577 on rank 1"),
        (lambda rank: {"only": lambda name: rank == 0 or "bias" in name}, "publishes other names, shapes"),
        (lambda rank: {"dtype": HALF if rank else None}, "publishes other names, shapes"),
    ],
    ids=["every_rank", "bucket", "only", "dtype"],
)
def test_ranks_that_gather_different_tensors(different: Any, words: str) -> None:
    """Every rank raises before anything is gathered, and says what is different."""

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, use_orig_params=True)
        given: dict[str, Tensor] = {}
        with pytest.raises(PublishError, match=f"rank 1.*{words}"):
            publish(model, given.__setitem__, **different(ranks.rank))
        assert not given

    run_threads(2, program)


def test_ranks_that_publish_to_different_places(tmp_path: Path) -> None:
    """Folders and slicings that differ are named on every rank; nothing is there for receivers."""

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, use_orig_params=True)
        with pytest.raises(PublishError, match="rank 1: expected the folder of rank 0, .*0, found .*1; give"):
            Publisher(model, Mailbox(tmp_path / str(ranks.rank))).publish()
        slicing = Slicing(2) if ranks.rank else Slicing()
        with pytest.raises(PublishError, match=r"rank 1: .*slicing is .*size=1.* on rank 0, .*size=2.* on rank 1"):
            Publisher(model, Mailbox(tmp_path, slicing=slicing)).publish()
        assert not Receiver({}, Mailbox(tmp_path)).receive()

    run_threads(2, program)


@each_row("through", ["mailbox", "function"])
def test_an_interrupt_while_publishing(through: str, tmp_path: Path) -> None:
    """The interrupted rank raises what has interrupted it, the others are told at once; publishing again works."""
    armed = [True]

    def interrupt(*_: Any) -> None:
        if armed:
            armed.pop()
            raise KeyboardInterrupt("stop")

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, use_orig_params=True)

        def once() -> None:
            if through == "mailbox":
                mailbox = Mailbox(tmp_path / "box")
                if ranks.rank == 0:
                    mailbox._commit = _before(interrupt, mailbox._commit)  # type: ignore[method-assign]
                publish(model, mailbox)
            else:
                publish(model, interrupt)

        with pytest.raises(PublishError if ranks.rank else KeyboardInterrupt, match="stop"):
            once()
        once()

    run_threads(2, program)


def _before(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any) -> Any:
        first()
        return then(*arguments)

    return both
