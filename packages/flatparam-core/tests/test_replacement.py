"""A parameter that the user replaced after its module was sharded: taken over if it fits, refused if it does not."""

import copy
from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParamError, FlatParamHandle, Residency, flatten_module, owner_of
from flatparam_core.geometry.shard_pieces import ShardPieces
from flatparam_core.testing import check_invariants

from .ranks import Ranks, flatten_alone, gather, reduce


class Tied(nn.Module):
    """Two linear maps that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.other = nn.Linear(2, 2, bias=False)
        self.other.weight = self.one.weight


def set_object(module: nn.Module, name: str, values: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(values))


def set_data(module: nn.Module, name: str, values: torch.Tensor) -> None:
    getattr(module, name).data = values


WAYS: dict[str, Callable[[nn.Module, str, torch.Tensor], None]] = {"object": set_object, "data": set_data}


@pytest.mark.pairs
@pytest.mark.parametrize("unsharded", [False, True], ids=["sharded", "unsharded"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_flat_parameter_refuses_a_replacement(name: str, unsharded: bool) -> None:
    """With use_orig_params=False, a replaced parameter is refused by its full name at the next change of what is shown."""
    module = nn.Sequential(nn.Linear(2, 2))
    handle = flatten_alone(module)
    if unsharded:
        gather([handle])
    setattr(module[0], name, nn.Parameter(torch.zeros(2)))
    with pytest.raises(FlatParamError, match=rf"'0\.{name}' was replaced"):
        handle.reshard() if unsharded else gather([handle])


def test_a_full_parameter_cannot_be_replaced(use_orig_params: bool) -> None:
    """While unsharded, a replacement is refused when the shard is to be shown; putting the leaf back makes all whole."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    sharded = module.weight.shape
    gather([handle])
    kept = module.bias
    module.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(FlatParamError, match="'bias' was replaced"):
        handle.reshard()
    assert module.weight is handle.leaves[0]
    module.bias = kept
    handle.reshard()
    assert module.weight.shape == sharded


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(2, 3), (6,)], ids=["full", "one-dimensional"])
@pytest.mark.parametrize("way", WAYS)
def test_values_that_fit_are_taken_over(way: str, shape: tuple[int, ...]) -> None:
    """New data, or a new object, of the full or of the sharded shape is what the next unshard gathers."""
    module = nn.Linear(3, 2)
    handle = flatten_alone(module, use_orig_params=True)
    values = torch.arange(1.0, 7.0)
    WAYS[way](module, "weight", values.reshape(shape))
    kept = module.weight
    handle.begin_unshard()
    assert torch.equal(handle.flat_param.detach()[:6], values)
    handle.reshard()
    assert module.weight is kept is handle.exposure.parameters()[0]
    assert kept.shape == (2, 3)
    assert kept.untyped_storage().data_ptr() == handle.flat_param.untyped_storage().data_ptr()
    check_invariants(handle)


@each_row("way", WAYS)
def test_each_rank_takes_its_part_of_the_full_values(way: str) -> None:
    """If every rank is given the full values, each keeps its own part, and all gather them whole."""
    make = lambda: nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # noqa: E731
    ranks = Ranks(make, 2, use_orig_params=True)
    values = torch.randn(3, 2, 2, 2)
    before = ranks.full_parameters()["bias"]
    for module in ranks.modules:
        WAYS[way](module, "weight", values.clone())
    for rank in range(2):
        full = ranks.full_parameters(rank)
        assert torch.equal(full["weight"], values)
        assert torch.equal(full["bias"], before)
    assert [tuple(module.weight.shape) for module in ranks.modules] == [(14, 1, 1, 1), (10, 1, 1, 1)]


@each_row("way", WAYS)
def test_each_rank_may_be_given_its_own_part(way: str) -> None:
    """A rank's part of new values, in the sharded shape, replaces that part; a rank that holds nothing gives nothing."""
    ranks = Ranks(lambda: nn.Linear(4, 3), 3, use_orig_params=True)
    shapes = [tuple(module.weight.shape) for module in ranks.modules]
    assert shapes == [(5, 1), (5, 1), (2, 1)]
    for rank, module in enumerate(ranks.modules):
        WAYS[way](module, "weight", torch.full(shapes[rank], float(rank)))
        WAYS[way](module, "bias", torch.full_like(module.bias, 9.0))
    full = ranks.full_parameters()
    assert full["weight"].flatten().tolist() == [0.0] * 5 + [1.0] * 5 + [2.0] * 2
    assert full["bias"].tolist() == [9.0] * 3


def test_a_new_object_is_trained_in_place_of_the_old_one() -> None:
    """A replaced parameter gets the gradients, and stepping it changes the shard; the old object gets none."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=True)
    old = module.weight
    module.weight = nn.Parameter(torch.zeros(2, 2))
    gather([handle])
    module(torch.ones(1, 2)).sum().backward()
    handle.deposit(0)
    handle.deposit(1)
    handle.reshard()
    reduce([handle])
    assert old.grad is None
    assert module.weight.grad.tolist() == [[1.0, 1.0]] * 2
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert handle.flat_param[:4].tolist() == [-0.5] * 4


def test_a_new_object_decides_whether_it_is_trained() -> None:
    """The requires_grad of a replacement is followed at the unshard that takes it over."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=True)
    module.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    gather([handle])
    assert [leaf.requires_grad for leaf in handle.leaves] == [False, True]


def test_tied_names_are_replaced_together() -> None:
    """A new object under every name of a tied parameter is taken over and shown under every name."""
    module = Tied()
    handle = flatten_alone(module, use_orig_params=True)
    new = nn.Parameter(torch.full((2, 2), 4.0))
    module.one.weight = module.other.weight = new
    gather([handle])
    assert module.one.weight is module.other.weight is handle.leaves[0]
    assert module.one.weight.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    handle.reshard()
    assert module.one.weight is module.other.weight is new


def test_new_data_of_a_tied_parameter_counts_under_every_name() -> None:
    """``.data =`` through one name of a tied parameter is a change of the one object, and taken over."""
    module = Tied()
    handle = flatten_alone(module, use_orig_params=True)
    module.other.weight.data = torch.full((2, 2), 5.0)
    gather([handle])
    assert module.one.weight.tolist() == [[5.0, 5.0], [5.0, 5.0]]


@each_row("name", ["one", "other"])
def test_one_of_several_tied_names_cannot_be_replaced(name: str) -> None:
    """A replacement under one name only is refused, with the name, before the module shows anything else."""
    module = Tied()
    handle = flatten_alone(module, use_orig_params=True)
    getattr(module, name).weight = nn.Parameter(torch.zeros(2, 2))
    before = handle.flat_param.detach().clone()
    with pytest.raises(FlatParamError, match=r"'(one|other)\.weight' was replaced"):
        gather([handle])
    assert torch.equal(handle.flat_param, before)
    assert not handle.is_unsharded


REFUSED: dict[str, tuple[torch.Tensor, str]] = {
    "shape": (torch.zeros(5), r"expected the full shape \(2, 3\) or this rank's part \(2, 3\), found \(5,\)"),
    "dtype": (torch.zeros(2, 3).double(), "expected torch.float32 on cpu, found torch.float64 on cpu"),
    "device": (
        torch.zeros(2, 3, device="meta"),
        "expected torch.float32 on cpu, found torch.float32 on meta",
    ),
}


@each_row("reason", REFUSED)
def test_values_that_do_not_fit_are_refused(reason: str) -> None:
    """A different shape, dtype or device is refused before anything moves, naming the parameter and both sides."""
    module = nn.Sequential(nn.Linear(3, 2))
    handle = flatten_alone(module, use_orig_params=True)
    before, kept = handle.flat_param.detach().clone(), module[0].weight
    values, found = REFUSED[reason]
    module[0].weight = nn.Parameter(values)
    with pytest.raises(FlatParamError, match=rf"'0\.weight' was given other data .*: {found}"):
        handle.begin_unshard()
    assert handle.residency is Residency.SHARDED
    assert torch.equal(handle.flat_param, before)
    check_invariants(handle)
    module[0].weight = kept
    gather([handle])
    assert module[0].weight.shape == (2, 3)


@each_row("remove", [lambda m: m.register_parameter("bias", None), lambda m: delattr(m, "bias")])
def test_a_removed_parameter_is_refused(remove: Callable[[nn.Module], None]) -> None:
    """A parameter that was taken out of its module is refused before anything is gathered."""
    module = nn.Linear(3, 2)
    handle = flatten_alone(module, use_orig_params=True)
    remove(module)
    with pytest.raises(FlatParamError, match="'bias' was replaced"):
        handle.begin_unshard()
    assert handle.residency is Residency.SHARDED


def test_a_part_of_another_rank_is_refused() -> None:
    """Data that fit one rank's part are refused on a rank that holds a different number of elements."""
    (handle,) = flatten_module(module := nn.Linear(4, 3), rank=2, world_size=3, use_orig_params=True)
    module.weight.data = torch.zeros(5, 1)
    with pytest.raises(FlatParamError, match=r"this rank's part \(2, 1\), found \(5, 1\)"):
        handle.begin_unshard()


def train_once(module: nn.Linear, handle: FlatParamHandle) -> None:
    gather([handle])
    module(torch.ones(1, 2)).sum().backward()
    handle.deposit(0)
    handle.deposit(1)
    handle.reshard()
    reduce([handle])


def test_another_shape_of_as_many_elements_is_refused() -> None:
    """A transposed weight is neither the full shape nor the sharded one: its elements would land in wrong places."""
    module = nn.Linear(3, 2)
    handle = flatten_alone(module, use_orig_params=True)
    module.weight.data = torch.zeros(3, 2)
    with pytest.raises(FlatParamError, match="'weight' was given other data"):
        handle.begin_unshard()


def test_data_of_a_sibling_is_taken_over() -> None:
    """``a.data = b.data`` gives a the values of b, and leaves the two apart."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    handle = flatten_alone(module, use_orig_params=True)
    module[0].weight.data = module[1].weight.data
    gather([handle])
    assert torch.equal(module[0].weight, module[1].weight)
    handle.reshard()
    assert module[0].weight.data_ptr() != module[1].weight.data_ptr()


@each_row("is_apart", [False, True], ids=["one-unit", "two-units"])
def test_a_parameter_is_not_tied_to_another_sharded_one(is_apart: bool) -> None:
    """What another parameter of a unit is cannot stand in this one's place, although its shape fits; nothing changes."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    units = [*module] if is_apart else [module]
    handles = [flatten_alone(each, use_orig_params=True) for each in units]
    before, kept = handles[-1].flat_param.detach().clone(), module[1].weight
    module[1].weight = module[0].weight
    names = ("weight", "weight") if is_apart else ("1.weight", "0.weight")
    with pytest.raises(FlatParamError, match=r"'{}' was tied to '{}' after".format(*names)):
        handles[-1].take_over()
    assert torch.equal(handles[-1].flat_param.detach(), before)
    module[1].weight = kept
    handles[-1].take_over()


def test_emptied_data_is_refused() -> None:
    """``.data = torch.empty(0)`` on a rank that holds elements of the parameter is refused before the gather."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=True)
    module.weight.data = torch.empty(0)
    with pytest.raises(FlatParamError, match="'weight' was given other data"):
        handle.begin_unshard()


def test_a_replacement_under_the_second_name_is_refused_before_the_gather() -> None:
    """A replacement under either of two tied names is refused alike: no rank issues the collective alone."""
    module = Tied()
    handle = flatten_alone(module, use_orig_params=True)
    module.other.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(FlatParamError, match=r"other\.weight"):
        handle.begin_unshard()


def test_a_new_object_is_owned_as_the_old_one_was() -> None:
    """After it was taken over, the new object is what owner_of knows, and the old one belongs to nobody."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=True)
    old = module.weight
    module.weight = new = nn.Parameter(torch.zeros(2, 2))
    gather([handle])
    assert owner_of(new) == (handle, 0)
    assert owner_of(old) is None
    handle.reshard()
    with pytest.raises(FlatParamError, match="already belongs to another unit"):
        flatten_alone(module)


def test_the_stamp_grows_with_a_new_object() -> None:
    """Taking over an object whose own count of changes starts at zero is a change like any other."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=True)
    with torch.no_grad():
        for _ in range(3):
            module.weight.fill_(3.0)
    before = handle.stamp()
    module.weight = nn.Parameter(torch.zeros(2, 2))
    gather([handle])
    assert handle.stamp() > before


def test_a_new_object_with_a_gradient_is_no_trap() -> None:
    """A gradient of the replacement is added to, as on any parameter, if it has the shape of the rank's part."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=True)
    module.weight = nn.Parameter(torch.zeros(2, 2))
    module.weight.grad = torch.ones(2, 2)
    train_once(module, handle)
    assert module.weight.grad.flatten().tolist() == [2.0] * 4


def test_all_are_taken_over_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parameters were given other data, as by an exchange of averages, the shard is cut once for them."""
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    handle = flatten_alone(module, use_orig_params=True)
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 3.0)
    cuts = []
    views = ShardPieces.views
    monkeypatch.setattr(ShardPieces, "views", lambda *given: cuts.append(given) or views(*given))
    gather([handle])
    assert len(handle.taken_over) == 10
    assert len(cuts) == 1
    assert torch.equal(handle.flat_param.detach()[:4], torch.full((4,), 3.0))


class Quantised(nn.Parameter):
    """A class of a library, which tells its parameters by it."""


def quantised(values: torch.Tensor, scale: float) -> Quantised:
    parameter = torch.Tensor._make_subclass(Quantised, values, False)
    parameter.scale = scale  # type: ignore[attr-defined]
    return parameter  # type: ignore[return-value]  # torch says that it is a tensor


def with_a_quantised_weight() -> nn.Linear:
    module = nn.Linear(2, 3, bias=False)
    module.weight = quantised(torch.arange(6, dtype=torch.uint8).view(3, 2), 0.5)
    return module


def test_full_parameters_have_the_class_of_the_originals(use_orig_params: bool) -> None:
    """What a module shows while it is unsharded has the class and the attributes that its parameter had."""
    module = with_a_quantised_weight()
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    copied = copy.deepcopy((module, handle))
    for again in (handle, copied[1]):
        again.revive()
        gather([again])
        (leaf,) = again.leaves
        assert type(leaf) is Quantised
        assert leaf.scale == 0.5
        assert not leaf.requires_grad
        again.reshard()


def test_a_frozen_stand_in_in_the_same_memory(use_orig_params: bool) -> None:
    """A frozen parameter may be replaced by a frozen one in its memory, and by no other; a trained one by none."""
    frozen, trained = (
        nn.Linear(2, 2, bias=False).requires_grad_(requires_grad=False),
        nn.Linear(2, 2, bias=False),
    )
    handles = [flatten_alone(each, use_orig_params=use_orig_params) for each in (frozen, trained)]
    gather(handles[:1])
    frozen.weight = nn.Parameter(frozen.weight.detach(), requires_grad=False)
    handles[0].reshard()
    gather(handles[:1])
    gather(handles[1:])
    assert frozen.weight is handles[0].leaves[0]
    values = frozen.weight.detach()
    refused = [
        (frozen, values, True),
        (frozen, values.clone(), False),
        (frozen, values.t(), False),
        (trained, trained.weight.detach(), True),
        (trained, trained.weight.detach(), False),
    ]
    for module, data, requires_grad in refused:
        before, handle = module.weight, handles[module is trained]
        module.weight = nn.Parameter(data, requires_grad=requires_grad)
        with pytest.raises(FlatParamError, match="'weight' was replaced"):
            handle.reshard()
        module.weight = before
    for handle in handles:
        handle.reshard()


def test_what_is_in_the_place_of_a_full_parameter_is_written_back(use_orig_params: bool) -> None:
    """A parameter that fits gives its values to the shard and its attributes to what is shown from then on."""
    module = with_a_quantised_weight()
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    for number in (2, 3):
        gather([handle], full_precision=True)
        values = torch.full((3, 2), number, dtype=torch.uint8)
        module.weight = quantised(values, 1.0 / number)
        handle.write_back()
        assert module.weight is handle.leaves[0]
        handle.reshard()
        check_invariants(handle)
        assert handle.flat_param.detach()[:6].tolist() == [number] * 6
    gather([handle])
    assert module.weight.scale == 1 / 3
    assert torch.equal(module.weight, values)
    module.weight = quantised(values.float(), 1.0)
    with pytest.raises(FlatParamError, match="'weight' was replaced"):
        handle.write_back()
        handle.reshard()


@each_row("way", WAYS)
def test_the_old_memory_keeps_the_old_values(way: str) -> None:
    """Values that are taken over do not reach who kept the old ones, and putting the old ones back restores them."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=True)
    before, old = handle.flat_param.tolist(), (module.weight, module.weight.data)
    WAYS[way](module, "weight", torch.zeros(2, 2))
    handle.take_over()
    assert old[1].flatten().tolist() == before[:4]
    assert handle.flat_param.tolist() == [0.0] * 4 + before[4:]
    if way == "object":
        module.weight = old[0]
    else:
        module.weight.data = old[1]
    handle.take_over()
    assert handle.flat_param.tolist() == before
    check_invariants(handle)


def test_a_follower_that_was_given_data_leaves_the_old_memory(use_orig_params: bool) -> None:
    """An optimizer's parameter from before sharding is taken over in new memory, and keeps its gradient."""
    module = nn.Linear(2, 2)
    held = list(module.parameters())
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    module(torch.ones(1, 2)).sum().backward()
    handle.deposit(0)
    handle.deposit(1)
    handle.reshard()
    reduce([handle])
    before, kept, grad = handle.flat_param.tolist(), held[0].data, held[0].grad
    held[0].data = torch.zeros(2, 2)
    handle.take_over()
    assert kept.flatten().tolist() == before[:4]
    assert handle.flat_param.tolist() == [0.0] * 4 + before[4:]
    assert held[0].grad is grad
    torch.optim.SGD(held, lr=1.0).step()
    assert handle.flat_param.tolist()[:4] == [-1.0] * 4


def test_full_parameters_in_memory_are_left_alone(use_orig_params: bool) -> None:
    """While the full parameters are shown there is nothing to take over."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    handle.take_over()
    assert module.weight is handle.leaves[0]
    assert handle.taken_over == ()


@each_row("unlisted", [False, True], ids=["listed", "unlisted"])
def test_a_flat_parameter_that_is_replaced_itself_is_refused(unlisted: bool) -> None:
    """An object in the flat parameter's own place, whose values nobody would read, is refused by name and rank."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module)
    handle.exposure.list_flat_parameter(not unlisted)
    module.register_parameter("_flat_param", nn.Parameter(torch.zeros(6)))
    with pytest.raises(FlatParamError, match=r"rank 0: the flat parameter '_flat_param' \(of weight, bias\)"):
        handle.begin_unshard()
    module._parameters["_flat_param"] = None if unlisted else handle.flat_param
    gather([handle])
    check_invariants(handle)
