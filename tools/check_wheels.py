"""Check what is in the built sdists and wheels: `python tools/check_wheels.py dist`.

Every file of the sources, `py.typed` and the licence must be in the wheel, and nothing of the tests; the sdist must
hold what a packager needs. Prints one line per problem and exits with 1 when there is one.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from house import read_toml
from release.changelog import Changelog
from release.packages import read_version

ROOT = Path(__file__).resolve().parent.parent


def names_in_wheel(path: Path) -> set[str]:
    """Return the names of the files in a wheel."""
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def names_in_sdist(path: Path) -> set[str]:
    """Return the names of the files in an sdist, without its top folder."""
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def problems_of(package: Path, dist: Path) -> list[str]:
    """Return what is wrong with the sdist and the wheel of one package, in sentences."""
    name = read_toml(package / "pyproject.toml")["project"]["name"]
    module, version = name.replace("-", "_"), read_version(package)
    wheel = dist / f"{module}-{version}-py3-none-any.whl"
    sdist = dist / f"{module}-{version}.tar.gz"
    missing = [f"{path.name} was not built" for path in (wheel, sdist) if not path.exists()]
    if missing:
        return missing

    source = package / "src"
    files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(source).as_posix() for path in files}
    wanted |= {f"{module}/py.typed", f"{module}-{version}.dist-info/licenses/LICENSE"}
    in_wheel = names_in_wheel(wheel)
    problems = [f"{wheel.name} lacks {name}" for name in sorted(wanted - in_wheel)]
    strange = {name for name in in_wheel if not name.startswith((f"{module}/", f"{module}-{version}.dist-info/"))}
    problems += [f"{wheel.name} holds {name}, which is not of {module}" for name in sorted(strange)]

    in_sdist = names_in_sdist(sdist)
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", f"src/{module}/py.typed"):
        if name not in in_sdist:
            problems.append(f"{sdist.name} lacks {name}")
    changelog = Changelog.read(package / "CHANGELOG.md")
    if version not in changelog.versions and not changelog.unreleased:
        problems.append(f"{package.name}/CHANGELOG.md has nothing about version {version}, and nothing unreleased")
    return problems


def built_straight(package: Path) -> list[str]:
    """Return what is wrong with a wheel that is built from the tree itself, without an sdist in between."""
    with tempfile.TemporaryDirectory() as place:
        command = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            place,
            str(package),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(place).glob("*.whl")
        licences = [name for name in names_in_wheel(wheel) if name.endswith("dist-info/licenses/LICENSE")]
        return [] if licences else [f"{wheel.name}, built straight from the tree, lacks LICENSE"]


def main(arguments: list[str]) -> int:
    """Check all packages and return the exit code."""
    dist = Path(arguments[0]) if arguments else ROOT / "dist"
    packages = sorted(path for path in (ROOT / "packages").iterdir() if path.is_dir())
    problems = [problem for package in packages for problem in problems_of(package, dist)]
    problems += built_straight(packages[0])
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{len(packages)} sdists and wheels are complete")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
