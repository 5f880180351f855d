"""What each rank does: save and load by all contenders in turn, and compare what was loaded with what was saved."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import define, field

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives

from .contenders import CONTENDERS, Contender, Library, Training
from .meters import Cost, Meter

Fingerprints = dict[str, dict[str, str]]
"""By contender, the hashes of everything that it saved; see `Training.fingerprint`."""


@define
class Findings:
    """What one rank found of one contender, with an entry for each round; `wrong` says what was not right."""

    saves: list[Cost] = field(factory=list)
    loads: list[Cost] = field(factory=list)
    disk: int = 0
    nbytes_read: int | None = None
    wrong: str = ""

    @contextmanager
    def judging(self) -> Iterator[None]:
        """A contender that fails is out, and the others go on."""
        try:
            yield
        except Exception as error:
            self.wrong = f"{type(error).__name__}: {error}"


def path_of(directory: str | Path, name: str) -> Path:
    """Where contender `name` saves."""
    return Path(directory, name.replace(",", "").replace(".", "-").replace(" ", "-").lower())


def save_and_load(
    group: Collectives, parameters: int, rounds: int, directory: str
) -> tuple[dict[str, Findings], Fingerprints]:
    """Every contender's costs on this rank, and on rank 0 what each one has saved."""
    meter = _prepared(group)
    sources: dict[Library, tuple[Training, dict[str, str]]] = {}
    for library in dict.fromkeys(contender.library for contender in CONTENDERS.values()):
        training = Training.begin(library, parameters, meter.group)
        training.step()
        sources[library] = training, training.fingerprint()
    findings = {name: Findings() for name in CONTENDERS}
    for _ in range(rounds):
        for name, contender in CONTENDERS.items():
            found, path = findings[name], path_of(directory, name)
            if not any(group.exchange(found.wrong)):
                with found.judging():
                    source, fingerprint = sources[contender.library]
                    _save(contender, source, path, meter, found)
                    _load(contender, parameters, path, meter, fingerprint, found)
    return findings, {name: sources[contender.library][1] for name, contender in CONTENDERS.items()}


def load_elsewhere(
    group: Collectives, parameters: int, directory: str, fingerprints: Fingerprints
) -> dict[str, Findings]:
    """What loading costs this rank where the world is not that of the save."""
    meter = _prepared(group)
    findings = {}
    for name, fingerprint in fingerprints.items():
        findings[name] = Findings()
        with findings[name].judging():
            path = path_of(directory, name)
            _load(CONTENDERS[name], parameters, path, meter, fingerprint, findings[name])
    return findings


def _prepared(group: Collectives) -> Meter:
    warnings.simplefilter("ignore")  # torch's FSDP1 warns at every turn
    ledger = ByteLedger()
    return Meter(RecordingCollectives(group, ledger), ledger)


def _save(contender: Contender, source: Training, path: Path, meter: Meter, found: Findings) -> None:
    if source.group.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    source.group.barrier()
    _, cost = meter.measure(lambda: contender.save(source, path), lambda finish: finish())
    found.saves.append(cost)
    found.disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _load(
    contender: Contender,
    parameters: int,
    path: Path,
    meter: Meter,
    expected: dict[str, str],
    found: Findings,
) -> None:
    fresh = Training.begin(contender.library, parameters, meter.group, seed=1)
    found.nbytes_read, cost = meter.measure(lambda: contender.load(fresh, path))
    found.loads.append(cost)
    loaded = fresh.fingerprint()
    if fresh.group.rank == 0 and loaded != expected:
        names = sorted(set(expected) | set(loaded))
        differing = [name for name in names if expected.get(name) != loaded.get(name)]
        found.wrong = f"{len(differing)} of {len(names)} values are not what was saved, first {differing[0]}"
