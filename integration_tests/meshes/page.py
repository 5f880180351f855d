"""Train a small Llama and a small Mixtral on meshes, by flatparam and by torch, and say what is right: docs/meshes.md.

    nox -s meshes                  # print the tables
    nox -s meshes -- --write       # and put them into docs/meshes.md
    nox -s meshes -- --short       # a few rows, and flatparam alone; fails if anything is wrong
    nox -s meshes -- --products    # only the pairs and triples of dimensions
    nox -s meshes -- --peers       # only what transformers shards by itself; it needs transformers

In the first table each cell is a run of three steps: loss, every parameter's gradient, the norm of clipping and the
weights are compared with those of one process that has all data. In the second each cell is a certificate
(`flatparam certify`) for every pair and every triple of dimensions, each of two ranks.
"""

import argparse
import itertools
import sys
import warnings
from collections import Counter
from typing import Any

from flatparam_certify import Certificate, certify
from flatparam_comm.testing import be_patient
from integration_tests.meshes.engines import OURS, THEIRS, Setting
from integration_tests.meshes.training import run
from tools.pages import ROOT, fill

PAGE = ROOT / "docs" / "meshes.md"

#: What a row is called, the sizes of its mesh, and how it is trained.
ROWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "2 data x 2 tensor": ((2, 2), {}),
    "1 data x 2 tensor": ((1, 2), {}),
    "2 data x 1 tensor": ((2, 1), {}),
    "2 replicate x 1 shard x 2 tensor": ((2, 1, 2), {}),
    "1 replicate x 2 shard x 2 tensor": ((1, 2, 2), {}),
    "2 x 2, two micro-batches": ((2, 2), {"micro_batches": 2}),
    "2 x 2, two micro-batches, the last one synchronises": (
        (2, 2),
        {"micro_batches": 2, "synchronises": False},
    ),
    "2 x 2, bf16, sums in fp32": ((2, 2), {"narrow": True}),
    "2 x 2, norms are plain parameters": ((2, 2), {"sequence": False, "loss_parallel": False}),
    "2 x 2, SGD": ((2, 2), {"optimizer": "SGD"}),
}
SHORT = 2


def told(faults: list[str]) -> str:
    """Return what a cell says: right, or what is wrong first."""
    if not faults:
        return "right"
    words = [fault.partition(": ")[2] for fault in faults]
    if any("Error" in each for each in words):
        first = next(each for each in words if "Error" in each)
        return f"crash: `{first.split(chr(10))[0][:60]}`"
    kinds = [
        kind
        for kind, sign in (
            ("norm", ": norm "),
            ("gradients", ": gradient"),
            ("weights", "weight"),
            ("loss", ": loss "),
        )
        if any(sign in each for each in words)
    ]
    return f"**wrong**: {', '.join(kinds) or words[0]}"


def table(rows: list[str], engines: tuple[str, ...]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| mesh | " + " | ".join(engine if engine in THEIRS else f"flatparam: {engine}" for engine in engines) + " |",
        "| --- " * (len(engines) + 1) + "|",
    ]
    for row in rows:
        shape, how = ROWS[row]
        cells = [told(run(Setting(engine, shape, **how), catches=True)) for engine in engines]
        lines.append(f"| {row} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


#: The name of each dimension in the table, and in a certificate.
DIMENSIONS = {
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "tp": "tp",
    "cp": "cp",
    "ep": "ep",
    "pp": "pp",
}
SPREAD = "integration_tests.meshes.spread"
#: The engines of the second table, by what they are called there.
SPREADERS = {"flatparam: originals": "originals", "flatparam: fully_shard": "in_place", "FSDP2": "torchs"}
SHORT_PRODUCT = ("shard", "tp", "ep")
PEERS = "integration_tests.meshes.peers"
#: The engines of the third table, and its rows.
LOADERS = {"flatparam behind `install(fsdp2=True)`": "ours", "FSDP2": "theirs"}
LOADED: list[tuple[str, tuple[str, ...]]] = [
    ("Llama", ("shard",)),
    ("Llama", ("tp",)),
    ("Llama", ("shard", "tp")),
    ("Llama", ("replicate", "tp")),
    ("Mixtral", ("shard", "tp")),
    ("Mixtral", ("ep",)),
    ("Mixtral", ("shard", "ep")),
    ("Mixtral", ("ep", "tp")),
]


def products() -> list[tuple[str, tuple[str, ...]]]:
    """Return the model and the dimensions of each row: experts take the model that has some."""
    return [
        (model, names)
        for model in ("Llama", "Mixtral")
        for size in (2, 3)
        for names in itertools.combinations(DIMENSIONS, size)
        if model == "Mixtral" or "ep" not in names
    ]


def certificate(place: str, case: str, engine: str, mesh: dict[str, int] | str) -> Certificate:
    """Return the certificate of a case and an engine of the module `place`, in the settings of all rows."""
    settings: dict[str, Any] = {"precisions": ("fp32",), "optimizers": ("adamw",)}
    return certify(f"{place}:{case}", f"{place}:{engine}", mesh, groups_of_one=False, **settings)


def certified(place: str, model: str, names: tuple[str, ...], engine: str) -> str:
    """Return what a cell says: right, in how many settings, or what is wrong in most of them."""
    found = certificate(place, model.upper(), engine, {DIMENSIONS[name]: 2 for name in names})
    ran = [each for each in found.runs if not each.skipped]
    wrong = [each for each in ran if each.findings]
    if not wrong:
        return f"right ({len(ran)})" if ran else "not run"
    texts = Counter(finding.text.partition("\n")[0][:60] for each in wrong for finding in each.findings)
    what = texts.most_common(1)[0][0]
    return f"**wrong** ({len(wrong)} of {len(ran)}): {what}"


def products_table(place: str, rows: list[tuple[str, tuple[str, ...]]], engines: dict[str, str]) -> list[str]:
    """Return the lines of the second table, or of the third, whose cases and engines are in the module `place`."""
    lines = ["| model | mesh | " + " | ".join(engines) + " |", "| --- " * (len(engines) + 2) + "|"]
    for model, names in rows:
        cells = [certified(place, model, names, engine) for engine in engines.values()]
        lines.append(f"| {model} | {' x '.join(names)} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def are_right(lines: list[str], names: int, engines: int) -> bool:
    """Return whether the first `engines` cells of each row say so, after those that name the row."""
    return all("right" in cell for line in lines[2:] for cell in line.split(" | ")[names : names + engines])


def main() -> int:
    """Print the tables, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/meshes.md")
    parser.add_argument("--short", action="store_true", help="a few rows of flatparam alone")
    parser.add_argument("--products", action="store_true", help="only the pairs and triples of dimensions")
    parser.add_argument("--peers", action="store_true", help="only what transformers shards by itself")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    be_patient()
    if chosen.peers:
        blocks = {"peers": products_table(PEERS, LOADED, LOADERS)}
        right = are_right(blocks["peers"], 2, 1)
    else:
        rows, spreaders = products(), SPREADERS
        if chosen.short:
            rows, spreaders = [("Mixtral", SHORT_PRODUCT)], dict(list(SPREADERS.items())[:1])
        blocks = {"products": products_table(SPREAD, rows, spreaders)}
        right = are_right(blocks["products"], 2, sum(each.startswith("flatparam") for each in spreaders))
    if not (chosen.products or chosen.peers):
        engines = OURS if chosen.short else (*OURS, *THEIRS)
        blocks["table"] = table(list(ROWS)[: SHORT if chosen.short else None], engines)
        right = right and are_right(blocks["table"], 1, len(OURS))
    if chosen.write:
        fill(PAGE, {name: "\n".join(lines) for name, lines in blocks.items()})
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
