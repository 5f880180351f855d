"""`flatparam ckpt diff`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flatparam_files import open_source, write_dcp, write_hugging_face

from .calling import Caller, tree


def _change(directory: Path, **changes: Any) -> None:
    """`b.pt`: like `a.pt`, with changes of the tree."""
    root = tree()
    for path, value in changes.items():
        place: Any = root
        *parents, name = path.split("__")
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part.replace("_0_", ".0.")]
        place[name.replace("_0_", ".0.")] = value
    torch.save(root, directory / "b.pt")


def test_equal_in_all_formats(flatparam: Caller) -> None:
    """The same checkpoint in other formats is equal, part by part, with the status 0."""
    write_dcp(open_source(flatparam.directory / "a.pt"), flatparam.directory / "dcp", world_size=3)
    write_hugging_face(open_source(flatparam.directory / "a.pt"), flatparam.directory / "hf")
    for first, second in (("run", "a.pt"), ("dcp", "run"), ("a.pt", "dcp")):
        found = flatparam("diff", f"@{first}", f"@{second}")
        assert (found.status, found.out, found.err) == (0, "equal: 9 tensors\n", "")
    assert flatparam("diff", "@hf", "@run", "--only", "model").status == 0
    found = flatparam("diff", "@hf", "@run")
    assert found.status == 1
    assert "optimizer/state/head.weight/step: only in" in found.out


def test_elements(flatparam: Caller) -> None:
    """It counts the elements that differ, and says by how much and where they differ most."""
    weight = tree()["model"]["blocks.0.weight"]
    weight[2, 3] += 0.25
    weight[4, 1] -= 2
    weight[0, 0] = torch.nan
    _change(flatparam.directory, model__blocks_0_weight=weight)
    found = flatparam("diff", "@run", "@b.pt")
    assert found.status == 1
    assert found.out == "model/blocks.0.weight: 3 of 30 elements differ, by at most inf (at [0, 0])\n"
    assert flatparam("diff", "@b.pt", "@b.pt").status == 0  # NaN is NaN
    assert flatparam("diff", "@run", "@b.pt", "--quiet").out == ""


def test_elements_without_a_distance(flatparam: Caller) -> None:
    """Infinities of two signs, and NaN and a number, are infinitely far apart, whatever the tolerance."""
    for name, values in (("x.pt", [torch.inf, torch.nan, 1.0]), ("y.pt", [-torch.inf, 5.0, 1.0])):
        torch.save({"w": torch.tensor(values)}, flatparam.directory / name)
    for tolerance in ("0", "10", "1e308"):
        found = flatparam("diff", "@x.pt", "@y.pt", "--tolerance", tolerance)
        assert found.out == "model/w: 2 of 3 elements differ, by at most inf (at [0])\n"


@pytest.mark.parametrize(("tolerance", "status"), [("0", 1), ("0.1", 1), ("0.26", 0)])
def test_tolerance(tolerance: str, status: int, flatparam: Caller) -> None:
    """Elements that are no further apart than the tolerance do not differ."""
    weight = tree()["model"]["blocks.0.weight"]
    weight[2, 3] += 0.25
    _change(flatparam.directory, model__blocks_0_weight=weight)
    found = flatparam("diff", "@run", "@b.pt", "--tolerance", tolerance)
    assert found.status == status
    assert (f"1 of 30 elements differ, by at most 0.25 (at [2, 3])" in found.out) == bool(status)  # noqa: F541


def test_large_tensors(flatparam: Caller) -> None:
    """A difference in a later piece of a large tensor has the right index."""
    for name, change in (("x.pt", 0.0), ("y.pt", 1.0)):
        big = torch.zeros(1000, 1100)
        big[987, 654] += change
        torch.save({"w": big}, flatparam.directory / name)
    found = flatparam("diff", "@x.pt", "@y.pt")
    assert found.out == "model/w: 1 of 1100000 elements differ, by at most 1 (at [987, 654])\n"


def test_structure(flatparam: Caller) -> None:
    """Names, shapes, dtypes and values that differ are listed, each in a line."""
    _change(
        flatparam.directory,
        model__new=torch.ones(2),
        model__blocks_0_bias=torch.ones(7),
        model__blocks_0_weight=tree()["model"]["blocks.0.weight"].double(),
        optimizer__param_groups__0__lr=0.2,
        epoch=4,
    )
    found = flatparam("diff", "@run", "@b.pt")
    assert found.status == 1
    assert set(found.out.splitlines()) == {
        f"model/new: only in {flatparam.directory}/b.pt",
        "model/blocks.0.bias: shapes [6] and [7]",
        "model/blocks.0.weight: dtypes torch.float32 and torch.float64",
        "optimizer/param_groups/0/lr: 0.1 and 0.2",
        "extra/epoch: 3 and 4",
    }


def test_dtypes_can_be_ignored(flatparam: Caller) -> None:
    """With --ignore-dtype a model in bfloat16 is compared by its numbers."""
    flatparam("export", "@run", "@hf", "--to", "hf", "--dtype", "bf16")
    arguments = ("diff", "@run", "@hf", "--only", "model")
    assert flatparam(*arguments, "--ignore-dtype", "--tolerance", "0.02").status == 0
    assert "elements differ" in flatparam(*arguments, "--ignore-dtype").out
    assert "dtypes" in flatparam(*arguments, "--tolerance", "0.02").out


def test_many_differences(flatparam: Caller) -> None:
    """The first twenty are shown, and all with --all."""
    for name, value in (("x.pt", 0.0), ("y.pt", 1.0)):
        torch.save({str(index): torch.tensor(value) for index in range(30)}, flatparam.directory / name)
    lines = flatparam("diff", "@x.pt", "@y.pt").out.splitlines()
    assert len(lines) == 21
    assert lines[-1] == "... and 10 more (--all shows them)"
    assert len(flatparam("diff", "@x.pt", "@y.pt", "--all").out.splitlines()) == 30


@pytest.mark.parametrize("tolerance", ["-1", "nan", "inf", "much"])
def test_wrong_tolerances(tolerance: str, flatparam: Caller) -> None:
    """A tolerance that is no finite number of at least 0 is refused."""
    assert flatparam("diff", "@run", "@run", f"--tolerance={tolerance}").status == 2


def test_large_integers(flatparam: Caller) -> None:
    """Integers that differ by one are not equal, also where float64 cannot tell them apart."""
    for name, more in (("x.pt", 0), ("y.pt", 1)):
        torch.save({"w": torch.tensor([7, 2**53 + more])}, flatparam.directory / name)
    found = flatparam("diff", "@x.pt", "@y.pt")
    assert found.status == 1
    assert "1 of 2 elements differ" in found.out
    assert "(at [1])" in found.out
