"""Set up everything and run flatparam, from a fresh clone and with nothing but Python 3.10 or newer.

    python3 tools/run.py train [-- ARGS]    train the example model; ARGS go to tools/train.py
    python3 tools/run.py test [-- ARGS]     run every check; ARGS go to nox instead, e.g. -- -s lint types
    python3 tools/run.py test core [ARGS]   run the tests of packages, from their sources; ARGS go to pytest
    python3 tools/run.py env                only set up
    python3 tools/run.py install [--into VENV] [--wheels FOLDER] [NAMES] [-- ARGS]
                                            install packages of this checkout, with all that they need, beside your own
                                            program: into VENV, or the Python that runs this; ARGS go to pip; with
                                            --wheels, only collect the wheels, for a machine without a network

What the first four set up is one environment, .venv in this checkout, with the versions of tools/constraints.txt; a
second call finds it and goes straight on. Then it hands over to nox (noxfile.py). pip reads its own configuration, so
PIP_INDEX_URL and the like choose another index, and FLATPARAM_TORCH=2.11.0 another torch. Exit codes: 2 says that this
machine lacks something, 3 that an installation failed; any other is the one of what was run.

Standard library only, and written so that older Pythons can parse it and be told that they are too old.
"""

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, NoReturn, Tuple

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
VENV = ROOT / ".venv"

OLDEST_PYTHON = (3, 10)
DISK_NEEDED_GB = 4
LACKING, FAILED = 2, 3

# What the checks need, beside torch. The extras of the packages come with the packages (noxfile.py).
TOOLS = [
    "nox",
    "attrs",
    "shtab",
    "tqdm",
    "typing-extensions",
    "xxhash",
    "build",
    "coverage",
    "editables",  # what an editable install of our packages needs without build isolation (CONTRIBUTING.md)
    "expecttest",  # what torch's own tests are written with
    "hatchling",
    "hypothesis",
    "import-linter",
    "mkdocs",
    "mkdocs-material",
    "mkdocstrings",
    "mkdocstrings-python",
    "mypy",
    "numpy",  # the oracle, torch's own FSDP, and warnings of torch without it
    "packaging",
    "pytest",
    "pytest-cov",
    "pytest-timeout",
    "pytest-xdist",
    "pyyaml",
    "ruff",
    "safetensors",  # other programs' reader and writer of these files, to compare with
    "tomli",
]
# Imported once after the installation: it proves that torch works here, and leaves the bytecode of what is used behind
# (installing with --no-compile and compiling only that is about 20 s faster than compiling all of torch).
WARM_UP = "import torch, torch.distributed.fsdp, torch.distributed.checkpoint, pytest, hypothesis"

NO_INDEX = (
    "NewConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "Failed to establish",
    "Name or service not known",
    "Temporary failure in name resolution",
    "ProxyError",
    "SSLError",
    "Connection refused",
    "Network is unreachable",
    "Max retries exceeded",
    "is not a trusted or secure host",
)


class Stop(Exception):
    """The set-up cannot go on: one sentence for the user, and the exit code."""

    def __init__(self, code: int, sentence: str) -> None:
        """Stop with `code`, saying `sentence`."""
        super().__init__(sentence)
        self.code = code


_said = 0


def say(what: str) -> None:
    """Print the next numbered line."""
    global _said
    _said += 1
    print("[%d] %s" % (_said, what), flush=True)


# What this machine must have


def check_python() -> None:
    """Stop unless this is Python 3.10 or newer with venv and pip."""
    found = "Python %d.%d.%d (%s)" % (*sys.version_info[:3], sys.executable)
    if tuple(sys.version_info[:2]) < OLDEST_PYTHON:
        raise Stop(
            LACKING,
            "flatparam needs Python 3.10 or newer, and this is %s: call this script with a newer one." % found,
        )
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise Stop(
                LACKING,
                "%s lacks the standard module %s, which makes environments: install it "
                "(on Debian and Ubuntu the package is called python3-venv)." % (found, module),
            )
    say(found)


def check_disk() -> None:
    """Stop unless the environment fits on the disk."""
    free = shutil.disk_usage(str(ROOT)).free / 1e9
    if free < DISK_NEEDED_GB:
        raise Stop(
            LACKING,
            "The environment needs about %d GB on the disk of %s, and only %.1f GB are free: make room."
            % (DISK_NEEDED_GB, ROOT, free),
        )
    say("%.0f GB of disk are free" % free)


# The environment


def venv_python() -> Path:
    """Return the path of the environment's Python."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def marker() -> Path:
    """Return the path of the file that says who made the environment and what is in it."""
    return VENV / "made-by-flatparam.txt"


def python_line() -> str:
    """Return the first line of the marker: what an environment cannot change once it is made."""
    return "Python %s in %s" % (platform.python_version(), VENV)


def constraints() -> str:
    """Return the locked versions, with torch's replaced where FLATPARAM_TORCH asks for another."""
    text = CONSTRAINTS.read_text(encoding="utf-8")
    wanted = os.environ.get("FLATPARAM_TORCH", "")
    if not wanted:
        return text
    if not re.match(r"\d+\.\d+(\.\d+)?([+.]?\w+)*$", wanted):
        raise Stop(LACKING, "FLATPARAM_TORCH must be a version such as 2.11.0, and it is %r." % wanted)
    return re.sub(r"(?m)^torch==.*$", "torch==" + wanted, text)


def torch_requirement(locked: str) -> str:
    """Return the line `torch==...` of the locked versions."""
    match = re.search(r"(?m)^torch==\S+", locked)
    if match is None:
        raise Stop(LACKING, "%s names no torch version: a line `torch==...` must be there." % CONSTRAINTS)
    return match.group(0)


def stamp(locked: str) -> str:
    """Return what the marker says once everything is installed."""
    digest = hashlib.sha256("\n".join([locked, *TOOLS]).encode()).hexdigest()[:16]
    return "%s\ncomplete, versions %s, %s\n" % (python_line(), digest, torch_requirement(locked))


def make_venv() -> None:
    """Make the environment, or keep the one that this script made with this Python earlier."""
    if marker().exists():
        same = marker().read_text(encoding="utf-8").splitlines()[:1] == [python_line()]
        if same and venv_python().exists():
            say("Bringing the environment .venv up to date")
            marker().write_text(python_line() + "\n", encoding="utf-8")
            return
    elif VENV.exists() and any(VENV.iterdir()):
        raise Stop(LACKING, "%s exists, and this script did not make it: move it away, or delete it." % VENV)
    say("Making the environment .venv")
    if VENV.exists():
        shutil.rmtree(str(VENV))
    VENV.mkdir()
    marker().write_text(python_line() + "\n", encoding="utf-8")
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    if made.returncode != 0:
        raise Stop(LACKING, "Python could not make an environment in %s: %s" % (VENV, telling_line(made.stdout)))


def pip_install(arguments: List[str]) -> Tuple[int, str]:
    """Install with pip, echo what is downloaded, and return the exit code and all that pip said."""
    command = [str(venv_python()), "-m", "pip", "install"]
    command += ["--no-compile", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
    command += arguments
    process = subprocess.Popen(
        command,
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        errors="replace",
    )
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if line.lstrip().startswith("Downloading"):
            print("      " + line.strip(), flush=True)
    with (VENV / "pip.log").open("a", encoding="utf-8") as log:
        log.writelines(["$ " + " ".join(command) + "\n", *said])
    return process.wait(), "".join(said)


def telling_line(text: str) -> str:
    """Return the line that tells most of a failed command: its first error, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return errors[0] if errors else lines[-1] if lines else "it said nothing"


def stop_installing(what: str, output: str) -> NoReturn:
    """Stop after pip failed to install `what`, telling the network, the disk and the rest apart."""
    if "No space left on device" in output:
        raise Stop(FAILED, "The disk of %s became full while installing %s: make room and call again." % (ROOT, what))
    if any(clue in output for clue in NO_INDEX):
        raise Stop(
            FAILED,
            "pip cannot reach its package index to install %s: check the network, or pip's own configuration "
            "(PIP_INDEX_URL, PIP_PROXY, PIP_CERT); what pip said is in %s." % (what, VENV / "pip.log"),
        )
    hint = ""
    if what.startswith("torch=="):
        hint = " (FLATPARAM_TORCH chooses another version; flatparam needs torch >=2.11,<2.16)"
    raise Stop(
        FAILED,
        "%s could not be installed for Python %s on %s %s%s: %s"
        % (
            what,
            platform.python_version(),
            platform.system(),
            platform.machine(),
            hint,
            telling_line(output),
        ),
    )


def install(locked: str) -> None:
    """Install the tools and torch into the environment, and see torch work."""
    constraints_file = VENV / "constraints.txt"
    constraints_file.write_text(locked, encoding="utf-8")
    torch = torch_requirement(locked)
    say("Installing nox and the tools of the checks")
    code, output = pip_install(["--constraint", str(constraints_file), *TOOLS])
    if code != 0:
        stop_installing("the tools", output)
    say("Installing %s (the longest step)" % torch)
    code, output = pip_install([torch])
    if code != 0:
        stop_installing(torch, output)
    say("Importing torch once")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    tried = subprocess.run(
        [str(venv_python()), "-W", "ignore", "-c", WARM_UP],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        env=environment,
    )
    if tried.returncode != 0:
        raise Stop(FAILED, "%s was installed, but importing it fails here: %s" % (torch, telling_line(tried.stdout)))


def set_up() -> None:
    """Make .venv hold the locked versions, doing nothing where it does already."""
    check_python()
    locked = constraints()
    done = stamp(locked)
    if marker().exists() and marker().read_text(encoding="utf-8") == done and venv_python().exists():
        say("The environment .venv is ready")
        return
    check_disk()
    make_venv()
    install(locked)
    marker().write_text(done, encoding="utf-8")
    say("The environment .venv is ready")


# The commands


def nox(arguments: List[str]) -> int:
    """Run nox in the environment and return its exit code; Ctrl-C is for nox to answer."""
    command = [str(venv_python()), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), *arguments]
    say("Handing over to nox: nox " + " ".join(arguments))
    process = subprocess.Popen(command, cwd=str(ROOT))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the terminal told nox too, and it may have a checkpoint to write


def package_tests(short: str) -> Path:
    """Return the folder of the tests of a package, by its name or by what comes after `flatparam-`."""
    packages = ROOT / "packages"
    named = [packages / short, packages / ("flatparam-" + short)]
    return next((each / "tests" for each in named if short and (each / "tests").is_dir()), ROOT / "nothing")


def test_packages(folders: List[Path], arguments: List[str]) -> int:
    """Run pytest over the tests of packages, with the sources of all packages, and return its exit code."""
    sources = sorted(str(each) for each in (ROOT / "packages").glob("*/src"))
    path = os.pathsep.join([*sources, str(ROOT), str(ROOT / "tools")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [
        str(venv_python()),
        "-m",
        "pytest",
        "-q",
        "-n",
        str(min(4, os.cpu_count() or 1)),
        "--dist",
        "worksteal",
    ]
    command += ["-m", "not gpu and not long", *map(str, folders), *arguments]
    say("Running pytest: " + " ".join(command[3:]))
    return subprocess.call(command, cwd=str(ROOT), env=environment)


def train(arguments: List[str]) -> int:
    """Train the example model."""
    return nox(["-s", "run", "--", "train", *arguments])


def test(arguments: List[str]) -> int:
    """Run every check, or the tests of the packages that `arguments` name, or what they tell nox to run."""
    started = time.monotonic()
    folders = []
    while arguments and package_tests(arguments[0]).is_dir():
        folders.append(package_tests(arguments[0]))
        arguments = arguments[1:]
    code = test_packages(folders, arguments) if folders else nox(arguments or ["-s", "tests"])
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    say("%s after %d min %02d s" % ("All green" if code == 0 else "Not green", minutes, seconds))
    return code


def env(arguments: List[str]) -> int:
    """Nothing more: the environment is set up before any command runs."""
    return 0


COMMANDS = {"train": train, "test": test, "env": env}


# Installing into somebody's own environment


def needed_by(names: List[str]) -> List[str]:
    """Return what pip is to install for `names`, paths with extras: these packages, and all of ours that they need.

    Each is the name of a package, or what comes after `flatparam-`, with extras in brackets if it is to have some.
    """
    packages = ROOT / "packages"
    extras: Dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name, bracket, chosen = waiting.pop(0).partition("[")
        if not (packages / name / "pyproject.toml").exists():
            name = "flatparam-" + name
        if not (packages / name / "pyproject.toml").exists():
            known = ", ".join(sorted(each.name for each in packages.glob("flatparam*")))
            raise Stop(LACKING, "There is no package %r here; there are %s." % (name, known))
        if name in extras and not bracket:
            continue
        extras[name] = extras.get(name) or bracket + chosen
        text = (packages / name / "pyproject.toml").read_text(encoding="utf-8")
        for field in ["dependencies", *re.findall(r"[\w-]+", chosen)]:
            listed = re.search(r"^%s = \[(.*?)\]$" % re.escape(field), text, re.MULTILINE | re.DOTALL)
            waiting += re.findall(r'"(flatparam[\w-]*(?:\[[\w,-]+\])?)', listed.group(1)) if listed else []
    return [str(packages / name) + chosen for name, chosen in extras.items()]


def python_of(environment: str) -> Path:
    """Return the Python of a virtual environment, or `environment` itself if it is a program."""
    place = Path(environment)
    found = [place / "bin" / "python", place / "Scripts" / "python.exe", place]
    for each in found:
        if each.is_file():
            return each
    raise Stop(LACKING, "%s has no Python: make it by %s -m venv %s" % (place, sys.executable, place))


def install_packages(arguments: List[str]) -> int:
    """Install packages of this checkout, in one call of pip: it would look for the others on its index."""
    more: List[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, more = arguments[:at], arguments[at + 1 :]
    python, verb = Path(sys.executable), ["install"]
    while arguments[:1] in (["--into"], ["--wheels"]):
        if len(arguments) < 2:
            takes = {"--into": "a virtual environment, or the path of a Python", "--wheels": "a folder"}
            raise Stop(LACKING, "%s takes %s." % (arguments[0], takes[arguments[0]]))
        if arguments[0] == "--into":
            python = python_of(arguments[1])
        else:
            verb = ["wheel", "--wheel-dir", arguments[1]]
        arguments = arguments[2:]
    places = needed_by(arguments or ["flatparam"])
    aim = "into the environment of %s" % python if verb == ["install"] else "as wheels into %s" % verb[-1]
    say("Installing %s %s" % (", ".join(Path(p).name for p in places), aim))
    pip = [str(python), "-m", "pip"]
    # What builds our packages, once for all of them: pip would install it anew for each.
    with tempfile.TemporaryDirectory() as folder:
        builder = [*pip, "install", "--quiet", "--disable-pip-version-check", "--target", folder, "hatchling>=1.27"]
        if subprocess.call(builder) != 0:
            raise Stop(FAILED, "pip could not install hatchling, which builds the packages: see above.")
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [*pip, *verb, "--no-build-isolation", *places, *more]
        return subprocess.call(command, env=dict(os.environ, PYTHONPATH=path))


def main(arguments: List[str]) -> int:
    """Run one command and return the exit code."""
    if arguments[:1] == ["install"] and arguments[1:2] not in (["-h"], ["--help"]):
        try:
            check_python()
            return install_packages(arguments[1:])
        except Stop as stop:
            print(stop, file=sys.stderr, flush=True)
            return stop.code
    if not arguments or arguments[0] not in COMMANDS:
        print(__doc__)
        return 0 if arguments[:1] in (["-h"], ["--help"], ["help"], ["install"]) else LACKING
    command, rest = COMMANDS[arguments[0]], arguments[1:]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    try:
        set_up()
    except Stop as stop:
        print(stop, file=sys.stderr, flush=True)
        return stop.code
    except KeyboardInterrupt:
        print("Interrupted: call again, and the set-up goes on.", file=sys.stderr)
        return 130
    return command(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
