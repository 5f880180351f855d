"""tools/check_layers.py finds each kind of broken wall: every test breaks one thing in a small sound house."""

from pathlib import Path

import check_layers
import pytest

ROOT = Path(__file__).resolve().parent.parent


class House:
    """A checkout in a temporary folder, with small packages that keep all rules: the layers and the add-ons."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, lower in check_layers.PACKAGES.items():
            self.add(name, *lower)

    def add(self, name: str, *lower: str) -> None:
        module = name.replace("-", "_")
        imports = "".join(f"from {other.replace('-', '_')} import public\n" for other in lower)
        self.write(name, "__init__.py", "import torch\n\n__all__ = ['public']\npublic = 1\n")
        self.write(name, "using.py", imports)
        self.write(name, "_hidden.py", "secret = 1\n")
        self.write(name, "testing.py", "__all__ = ['check_it']\ncheck_it = 1\n")
        self.write(name, "py.typed", "")
        package = self.root / "packages" / name
        (package / "tests").mkdir()
        for file in ("README.md", "CHANGELOG.md", "LICENSE"):
            (package / file).write_text(f"# {module}\n")
        self.declare(name, "torch>=2.11,<2.16", *(f"{other}>=0.1,<0.2" for other in lower))

    def source(self, package: str, file: str) -> Path:
        return self.root / "packages" / package / "src" / package.replace("-", "_") / file

    def write(self, package: str, file: str, text: str) -> None:
        path = self.source(package, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def declare(self, package: str, *dependencies: str) -> None:
        tools = list(check_layers.TOOLS)
        extras = f"[project.optional-dependencies]\ntest = {tools}\n"
        text = f'[project]\nname = "{package}"\ndependencies = {list(dependencies)}\n{extras}'
        (self.root / "packages" / package / "pyproject.toml").write_text(text)

    def problems(self) -> list[str]:
        return check_layers.problems(self.root)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_a_sound_house_has_no_problems(house: House) -> None:
    """The house that the other tests break is sound, and the command says so."""
    assert house.problems() == []
    assert check_layers.main([str(house.root)]) == 0


@pytest.mark.long  # and `nox -s layers`
def test_this_checkout_is_sound() -> None:
    """The rules hold for the repository itself."""
    assert check_layers.problems(ROOT) == []


@pytest.mark.parametrize(
    ("package", "code", "complaint"),
    [
        ("flatparam-core", "from flatparam_comm import public", "may import no other layer"),
        ("flatparam-comm", "import flatparam_runtime", "flatparam-comm imports flatparam-runtime"),
        (
            "flatparam-runtime",
            "from flatparam_core import public",
            "flatparam-runtime imports flatparam-core",
        ),
        ("flatparam-state", "def f():\n    import flatparam_comm", "flatparam-state imports flatparam-comm"),
    ],
)
def test_only_the_layer_directly_beneath(house: House, package: str, code: str, complaint: str) -> None:
    """Neither a layer above nor one further down can be imported, not even inside a function."""
    house.write(package, "broken.py", code + "\n")
    (problem,) = [problem for problem in house.problems() if "does not declare" not in problem]
    assert complaint in problem
    assert "broken.py:" in problem


@pytest.mark.parametrize("layer", check_layers.LAYERS)
@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    from flatparam_plan import public",
        "import importlib\nimportlib.import_module('flatparam_plan')",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import flatparam_plan",
    ],
)
def test_no_layer_imports_an_add_on(house: House, layer: str, code: str) -> None:
    """Not inside a function, nor by a name that it is given as text, nor beside what is for type checkers."""
    house.write(layer, "broken.py", f"{code}\n")
    assert any(f"{layer} imports flatparam-plan, and may" in problem for problem in house.problems())


def test_the_wrapper_names_an_add_on_for_type_checkers(house: House) -> None:
    """It does for what it promises, by public names; it may declare the add-on, and no layer beneath may do either."""
    head = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flatparam_plan import "
    lower = tuple(f"{each}>=0.1,<0.2" for each in check_layers.LAYERS["flatparam"])
    house.declare("flatparam", "torch>=2.11,<2.16", *lower, "flatparam-plan>=0.1,<0.2")
    assert house.problems() == []
    house.write("flatparam", "typed.py", f"{head}public\n")
    assert house.problems() == []
    house.write("flatparam", "typed.py", f"{head}secret\n")
    assert any("secret is not a public name of flatparam_plan" in problem for problem in house.problems())
    house.write("flatparam", "typed.py", "")
    house.write("flatparam-core", "typed.py", f"{head}public\n")
    assert any("flatparam-core imports flatparam-plan" in problem for problem in house.problems())
    house.write("flatparam-core", "typed.py", "")
    house.declare("flatparam-core", "torch>=2.11,<2.16", "flatparam-plan>=0.1,<0.2")
    assert any("declares flatparam-plan, which nothing" in problem for problem in house.problems())


def test_the_runtime_names_the_add_on_that_it_promises(house: House) -> None:
    """It does for type checkers, and need not declare it; another add-on it may not name."""
    head = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {} import public\n"
    house.write("flatparam-runtime", "typed.py", head.format("flatparam_optim"))
    assert house.problems() == []
    house.write("flatparam-runtime", "typed.py", head.format("flatparam_plan"))
    assert any("flatparam-runtime imports flatparam-plan" in problem for problem in house.problems())


def test_no_package_imports_a_tool(house: House) -> None:
    """Not even inside a function, but for type checkers where comm promises its names; nor does it declare one to run."""
    head = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flatparam_simdev import public\n"
    house.write("flatparam-comm", "typed.py", head)
    assert house.problems() == []
    for package in set(check_layers.PACKAGES) - set(check_layers.TOOLS):
        house.write(package, "broken.py", "def f():\n    import flatparam_simdev\n")
        assert any(f"{package} imports flatparam-simdev, and may" in problem for problem in house.problems())
        house.source(package, "broken.py").unlink()


def test_the_extra_of_tests_has_the_tools(house: House) -> None:
    """What stands on comm is tested with the tool that does, and says so; what stands on the core alone need not."""
    project = house.root / "packages" / "flatparam-runtime" / "pyproject.toml"
    project.write_text(project.read_text().replace("['flatparam-simdev']", "['pytest']"))
    (problem,) = house.problems()
    assert "the extra `test` lacks flatparam-simdev, with which flatparam-runtime is tested" in problem
    project.write_text(project.read_text().replace("['pytest']", "['flatparam-simdev>=0.1,<0.2']"))
    project = house.root / "packages" / "flatparam-files" / "pyproject.toml"
    project.write_text(project.read_text().replace("['flatparam-simdev']", "['pytest']"))
    assert house.problems() == []


def test_an_add_on_imports_what_is_open(house: House) -> None:
    """Of the wrapper it imports public names, and those of the modules that are listed for add-ons; no other."""
    house.write("flatparam", "compat/__init__.py", "__all__ = ['shown']\nshown = hidden = 1\n")
    house.write("flatparam", "wrap.py", "__all__ = ['CustomPolicy']\n_Policy = _Other = CustomPolicy = 1\n")
    sound = "from flatparam import public\nfrom flatparam.compat import shown\n"
    house.write("flatparam-plan", "it.py", f"{sound}from flatparam.wrap import CustomPolicy, _Policy\n")
    assert house.problems() == []
    for code, complaint in (
        ("from flatparam.compat import hidden", "hidden is not a public name of flatparam.compat"),
        ("from flatparam.wrap import _Other", "_Other is not a public name"),
        ("from flatparam._hidden import secret", "flatparam._hidden is a private module"),
        ("from flatparam_core._hidden import secret", "flatparam_core._hidden is a private module"),
    ):
        house.write("flatparam-plan", "it.py", f"{code}\n")
        (problem,) = house.problems()
        assert complaint in problem


def test_an_add_on_imports_no_other(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its inside nor its public names."""
    others = {**check_layers.ADDONS, "flatparam-other": ("flatparam",)}
    monkeypatch.setattr(check_layers, "ADDONS", others)
    packages = {**check_layers.LAYERS, **others, **check_layers.TOOLS}
    for module in ("check_layers", "house"):
        monkeypatch.setattr(f"{module}.PACKAGES", packages)
    house.add("flatparam-other", "flatparam")
    assert house.problems() == []
    house.write("flatparam-other", "broken.py", "from flatparam_plan import public\n")
    assert any("flatparam-other imports flatparam-plan, and may" in problem for problem in house.problems())


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("from flatparam_core._hidden import secret", "flatparam_core._hidden is a private module"),
        ("import flatparam_core._hidden", "flatparam_core._hidden is a private module"),
        ("from flatparam_core import secret", "secret is not a public name of flatparam_core"),
        ("import flatparam_core as fc\nx = fc.secret", "secret is not a public name of flatparam_core"),
        ("from flatparam_core.testing import other", "other is not a public name of flatparam_core.testing"),
        ("from flatparam_core import *", "not *"),
    ],
)
def test_only_public_names(house: House, code: str, complaint: str) -> None:
    """A name of the layer beneath must be in its `__all__`; of its modules, only `testing` is open."""
    house.write("flatparam-comm", "broken.py", code + "\n")
    (problem,) = house.problems()
    assert complaint in problem


def test_testing_is_public(house: House) -> None:
    """What a layer ships for tests can be used by the one above, in every way of importing it."""
    code = "from flatparam_core import public, testing\nfrom flatparam_core.testing import check_it\n"
    house.write("flatparam-comm", "sound.py", code + "import flatparam_core\nx = flatparam_core.testing.check_it\n")
    assert house.problems() == []


def test_a_layer_without_a_list_of_public_names(house: House) -> None:
    """Without `__all__` nothing is public."""
    house.write("flatparam-core", "__init__.py", "import torch\npublic = 1\n")
    assert any("flatparam_core has no __all__" in problem for problem in house.problems())


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch\ntorch.distributed.barrier()",
        "import importlib\nimportlib.import_module('torch.distributed')",
    ],
)
def test_core_is_free_of_torch_distributed(house: House, code: str) -> None:
    """Every way for the core to reach `torch.distributed` is found."""
    house.write("flatparam-core", "broken.py", code + "\n")
    assert any("must not know ranks" in problem for problem in house.problems())


@pytest.mark.parametrize(
    "code",
    [
        "from torch.distributed.fsdp import ShardingStrategy",
        "from torch.distributed import fsdp",
        "import torch.distributed as dist\nx = dist.fsdp.FullyShardedDataParallel",
    ],
)
@pytest.mark.parametrize(("package", "file"), [("flatparam-comm", "names.py"), ("flatparam", "compat.py")])
def test_torch_fsdp_only_in_the_compatibility_module(house: House, code: str, package: str, file: str) -> None:
    """torch's FSDP is known in two files of add-ons and nowhere else, whatever the file is called."""
    house.write("flatparam-clients", "installing.py", code + "\n")
    house.write("flatparam-certify", "engines.py", code + "\n")
    assert house.problems() == []
    house.write(package, file, code + "\n")
    assert any(
        "only packages/flatparam-clients/src/flatparam_clients/installing.py and "
        "packages/flatparam-certify/src/flatparam_certify/engines.py may" in problem
        for problem in house.problems()
    )


def test_facades_are_for_other_programs(house: House) -> None:
    """A façade of FSDP1's private modules may use another one, and nothing else of ours may."""
    code = "from flatparam_clients.private._runtime_utils import _lazy_init\n"
    house.write("flatparam-clients", "private/_other.py", code)
    assert house.problems() == []
    house.write("flatparam-clients", "wrapper.py", code)
    assert any("uses flatparam_clients.private._runtime_utils" in problem for problem in house.problems())


def test_an_import_must_be_declared(house: House) -> None:
    """A distribution that is imported and not declared is found; the standard library is not one."""
    house.write("flatparam-comm", "broken.py", "import json\nimport attr\nfrom attrs import frozen\n")
    (problem,) = house.problems()
    assert "imports attrs, which packages/flatparam-comm/pyproject.toml does not declare" in problem


def test_a_declaration_must_be_used(house: House) -> None:
    """A dependency that nothing imports is found."""
    house.declare("flatparam-core", "torch>=2.11,<2.16", "typing-extensions>=4.9")
    (problem,) = house.problems()
    assert "declares typing-extensions, which nothing in src imports" in problem


def test_neighbours_are_ranges(house: House) -> None:
    """A pin, or an open end, on a neighbour is found."""
    house.declare("flatparam-comm", "torch>=2.11,<2.16", "flatparam-core==0.1.0")
    (problem,) = house.problems()
    assert "must be a range" in problem


def test_a_licence_is_that_of_the_repository(house: House) -> None:
    """A package's copy of the licence that says something else is found."""
    (house.root / "LICENSE").write_text("all rights")
    found = house.problems()
    assert len(found) == len(check_layers.PACKAGES)
    assert all("LICENSE is not the LICENSE of the repository" in problem for problem in found)


def test_a_package_holds_certain_things(house: House) -> None:
    """Something else, and one of them missing, are found."""
    package = house.root / "packages" / "flatparam-core"
    (package / "setup.py").write_text("")
    (package / "CHANGELOG.md").unlink()
    (package / "__pycache__").mkdir()
    found = house.problems()
    assert any("holds setup.py" in problem for problem in found)
    assert any("lacks CHANGELOG.md" in problem for problem in found)
    assert len(found) == 2


def test_a_package_is_typed_and_is_one(house: House) -> None:
    """`py.typed` is there, and src holds the import package alone."""
    house.source("flatparam-core", "py.typed").unlink()
    (house.root / "packages" / "flatparam-core" / "src" / "other").mkdir()
    found = house.problems()
    assert any("lacks py.typed" in problem for problem in found)
    assert any("must hold flatparam_core and nothing else" in problem for problem in found)


def test_there_are_no_other_packages(house: House) -> None:
    """A package that is neither a layer nor an add-on is found."""
    (house.root / "packages" / "flatparam-extra").mkdir()
    (house.root / "packages" / "flatparam-extra" / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert any("flatparam-extra is neither one of the layers" in problem for problem in house.problems())


def test_the_command_prints_and_fails(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one line per problem, with file and line, and exits with 1."""
    house.write("flatparam-core", "broken.py", "\nimport torch.distributed\n")
    assert check_layers.main([str(house.root)]) == 1
    assert capsys.readouterr().out.startswith("packages/flatparam-core/src/flatparam_core/broken.py:2: ")


def test_a_signature_leads_to_what_is_passed_on(house: House) -> None:
    """A name is passed on if a signature mentions it, or a class that a signature leads to, or takes or returns one."""
    house.write("flatparam-core", "made.py", "class Made:\n    part: Part\n\n\nclass Part:\n    pass\n")
    house.write("flatparam-core", "more.py", "def make() -> Part: ...\n\n\ndef unrelated() -> int: ...\n")
    names = ("Made", "Part", "make", "unrelated", "public", "testing")
    house.write("flatparam-core", "__init__.py", f"import torch\n\n__all__ = {list(names)}\n")
    passed = "import torch\nfrom flatparam_core import Made, Part, make, unrelated\n\n"
    house.write(
        "flatparam-comm",
        "__init__.py",
        passed + '__all__ = ["Made", "Part", "make", "public", "unrelated"]\n',
    )
    house.write("flatparam-comm", "used.py", "from flatparam_core import Made\n\n\ndef use(made: Made) -> None: ...\n")
    (problem,) = house.problems()
    assert "passes unrelated on, to which none of its signatures leads" in problem
    house.write("flatparam-comm", "__init__.py", passed + '__all__ = ["Made", "Part", "make", "public"]\n')
    assert house.problems() == []  # it does not pass on what it only uses
