"""What clients of FSDP2 are run for: the cells of the table in docs/guides/from-fsdp2.md, and how each is decided.

Each run is one of torch's `fully_shard` and one of flatparam's, by `flatparam run`; both are compared bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs

from integration_tests.clients.running import OURS, PROGRAMS, Losses, after, losses_in
from tools import pages

__all__ = ["CELLS", "SIDES", "Cell", "RunFailed", "Server"]

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "guides" / "from-fsdp2.md"
SIDES: Final = ("FSDP2", "flatparam")


class RunFailed(Exception):
    """A program that ended badly; the text is its traceback."""


@final
@attrs.frozen
class Server:
    """Runs programs on one side; see `programs/server.py`."""

    side: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, side: str) -> Server:
        runner = OURS if side == "flatparam" else ()
        quiet = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        process = subprocess.Popen(
            [sys.executable, *runner, str(PROGRAMS / "server.py")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_CBWR": "AVX2,STRICT", **quiet},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        found = cls(side, process)
        assert found._told() == "ready"
        return found

    def _told(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, program: str, folder: Path, options: Sequence[str], ranks: int = 2) -> Losses:
        """What the ranks print.

        Raises:
            RunFailed: if a rank fails.
        """
        # A model that transformers shards is nothing to accelerate.
        on_cpu = [] if "--loaded" in options or program in ALONE else [PROGRAMS / "on_cpu.py"]
        argv = [*map(str, on_cpu), str(PROGRAMS / program), str(folder), *options]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"ranks": ranks, "argv": argv}) + "\n")
        self.process.stdin.flush()
        told = json.loads(self._told())
        if told["status"]:
            raise RunFailed(told["errors"])
        return losses_in(told["output"], OURS if self.side == "flatparam" else ())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


ALONE: Final = ("fsdp2_dcp.py", "fsdp2_fabric.py", "fsdp2_lightning.py")
"""The programs that do not use accelerate."""


@final
@attrs.frozen
class Cell:
    """One claim about a client."""

    client: str
    column: str
    program: str
    options: str = ""
    how: str = "losses"
    """`losses`: of one run; `resumed`: by each what each has saved; `elastic`: from two ranks to one, and to three."""

    def __str__(self) -> str:
        return f"{self.client}-{self.column}-{self.options}".replace(" ", "_")

    def decide(self, servers: Mapping[str, Server], folder: Path) -> str:
        """Run it, and return what the table says.

        Raises:
            AssertionError: if bits differ.
        """
        decide: Any = getattr(self, f"_{self.how}")
        return str(decide(servers, folder))

    def _whole(self, servers: Mapping[str, Server], folder: Path) -> dict[str, Losses]:
        """The losses of a run on two ranks, which are FSDP2's bits."""
        found = {side: servers[side].run(self.program, folder / side, self.options.split()) for side in SIDES}
        assert {step for _, step in found["FSDP2"]} >= {0, 1, 2, 3}
        assert found["flatparam"] == found["FSDP2"]
        return found

    def _losses(self, servers: Mapping[str, Server], folder: Path) -> str:
        self._whole(servers, folder)
        return "same bits"

    def _goes_on(self, server: Server, saved: Path, at: int, ranks: int, options: str = "") -> Losses:
        """The losses of a run that goes on from a copy of what was saved, and the copy has what it saves."""
        own = saved.with_name(f"{saved.name}-{at}-{server.side}")
        shutil.copytree(saved, own)
        words = [*self.options.split(), f"--resume={at}", *options.split()]
        found = server.run(self.program, own, words, ranks)
        return {key: value for key, value in found.items() if key[1] >= at}

    def _resumed(self, servers: Mapping[str, Server], folder: Path) -> str:
        whole = self._whole(servers, folder)
        for saved_by in SIDES:
            for side in SIDES:
                found = self._goes_on(servers[side], folder / saved_by, 2, 2)
                assert found == after(2, whole[side]), f"{side} resumes what {saved_by} has saved"
        return "exact, also each other's"

    def _elastic(self, servers: Mapping[str, Server], folder: Path) -> str:
        """Whoever has saved and whoever goes on: on one rank, and from there on three, the bits are the same."""
        self._whole(servers, folder)
        one, three = ELASTIC.get(self.program, ("", ""))
        found = []
        for saved_by in SIDES:
            for side in SIDES:
                shutil.copytree(folder / saved_by, folder / f"{saved_by}-{side}")
                saved = folder / f"{saved_by}-{side}"
                on_one = self._goes_on(servers[side], saved, 2, 1, one)
                other = SIDES[1 - SIDES.index(side)]
                on_three = [
                    self._goes_on(servers[each], saved.with_name(f"{saved.name}-2-{side}"), 3, 3, three)
                    for each in (side, other)
                ]
                found.append((on_one, *on_three))
        first = found[0]
        assert len(first[0]) == 2
        assert len(first[1]) == 3
        assert first[1] == first[2]
        assert all(each == first for each in found)
        return "same bits, also each other's"


ELASTIC: Final = {
    "fsdp2_trainer.py": ("--batch=12", "--batch=4"),
    "trl_trainers.py": ("--batch=12", "--batch=4"),
    "fsdp2_fabric.py": ("--ranks=1", "--ranks=3"),
    "fsdp2_lightning.py": ("--ranks=1", "--ranks=3"),
}
"""The options with which one rank, and three, have the batches that two ranks had."""

COLUMNS: Final = (
    "losses, clip",
    "sharded resume, exact AdamW",
    "full resume, exact AdamW",
    "accumulation",
    "bfloat16",
    "checkpointing",
    "LoRA",
    "generate",
    "elastic",
    "others",
)

_LOOP, _TRAINER, _TRL = "accelerate", "transformers `Trainer`", "TRL"


def _of(client: str, program: str, base: str, **options: str | None) -> list[Cell]:
    """The usual cells of a client: the options of each column that it has."""
    keys = dict(
        zip(
            (
                "losses",
                "sharded",
                "full",
                "accumulation",
                "bf16",
                "checkpointing",
                "lora",
                "generate",
                "elastic",
            ),
            COLUMNS,
            strict=False,
        )
    )
    hows = {"sharded": "resumed", "full": "resumed", "elastic": "elastic"}
    return [
        Cell(client, keys[key], program, f"{base} {more}".strip(), hows.get(key, "losses"))
        for key, more in options.items()
        if more is not None
    ]


CELLS: Final = [
    *_of(
        _LOOP,
        "fsdp2_loop.py",
        "",
        sharded="",
        full="--full",
        accumulation="--accumulate",
        bf16="--bf16",
        checkpointing="--checkpointing",
        generate="--generate",
        elastic="",
    ),
    Cell(_LOOP, "LoRA", "fsdp2_loop.py", "--lora", "resumed"),
    Cell(_LOOP, "LoRA", "fsdp2_loop.py", "--qlora", "resumed"),
    Cell(_LOOP, "LoRA", "fsdp2_loop.py", "--qlora --bytes"),
    Cell(_LOOP, "others", "fsdp2_loop.py", "--ram --tied --bf16"),
    *_of(
        _TRAINER,
        "fsdp2_trainer.py",
        "",
        sharded="",
        full="--full",
        accumulation="--accumulate",
        bf16="--bf16",
        checkpointing="--checkpointing --tied",
        lora="--lora",
        generate="--generate",
        elastic="--batch=6",
    ),
    *_of(
        "transformers, sharded while it loads",
        "fsdp2_trainer.py",
        "--loaded",
        losses="",
        accumulation="--accumulate",
        bf16="--bf16 --tied",
        lora="--lora",
        generate="--generate --tied",
    ),
    Cell(
        "transformers, sharded while it loads",
        "checkpointing",
        "fsdp2_trainer.py",
        "--loaded --checkpointing",
    ),
    *_of("TRL: SFT", "trl_trainers.py", "SHARDED_STATE_DICT sft --fsdp2", sharded="--clip", lora="--lora"),
    *_of("TRL: SFT", "trl_trainers.py", "FULL_STATE_DICT sft --fsdp2", full=""),
    *_of(
        "TRL: SFT",
        "trl_trainers.py",
        "SHARDED_STATE_DICT sft --fsdp2",
        accumulation="--accumulate",
        bf16="--bf16",
        checkpointing="--checkpointing",
        elastic="--batch=6",
    ),
    *_of(
        "TRL: DPO",
        "trl_trainers.py",
        "SHARDED_STATE_DICT dpo --fsdp2",
        sharded="",
        accumulation="--accumulate",
        bf16="--bf16",
        checkpointing="--checkpointing",
        lora="--lora",
        elastic="--batch=6",
    ),
    *_of("TRL: DPO", "trl_trainers.py", "FULL_STATE_DICT dpo --fsdp2", full=""),
    *_of(
        "TRL: reward",
        "trl_trainers.py",
        "SHARDED_STATE_DICT reward --fsdp2",
        sharded="--clip",
        accumulation="--accumulate",
        bf16="--bf16",
        checkpointing="--checkpointing",
        lora="--lora",
        elastic="--batch=6",
    ),
    *_of("TRL: reward", "trl_trainers.py", "FULL_STATE_DICT reward --fsdp2", full=""),
    *_of("TRL: GRPO", "trl_trainers.py", "SHARDED_STATE_DICT grpo --fsdp2", losses="--rollout", generate=""),
    *_of(
        "Lightning `Trainer`",
        "fsdp2_lightning.py",
        "",
        sharded="",
        full="--full",
        accumulation="--accumulate",
        bf16="--bf16",
        checkpointing="--checkpointing",
        elastic="",
    ),
    *_of(
        "Lightning Fabric",
        "fsdp2_fabric.py",
        "",
        sharded="",
        full="--full",
        accumulation="--accumulate",
        bf16="--bf16",
        checkpointing="--checkpointing",
        elastic="",
    ),
    *_of(
        "`torch.distributed.checkpoint`",
        "fsdp2_dcp.py",
        "",
        sharded="",
        full="--full",
        bf16="--bf16",
        elastic="",
    ),
    Cell("`torch.distributed.checkpoint`", "elastic", "fsdp2_dcp.py", "--full", "elastic"),
    Cell("`torch.distributed.checkpoint`", "others", "fsdp2_dcp.py", "--compile"),
    *_of(
        "diffusers, by accelerate",
        "fsdp2_diffusers.py",
        "",
        sharded="",
        full="--full",
        accumulation="--accumulate",
        bf16="--bf16",
    ),
]


_ALWAYS: Final = ("--fsdp2", "--loaded")


def table(said: Mapping[str, str]) -> str:
    """The table, in Markdown, of what the test of each cell says."""
    rows: dict[str, dict[str, list[str]]] = {}
    for cell in CELLS:
        told = said.get(str(cell))
        if told is not None:
            flags = [each for each in cell.options.split() if each[:2] == "--" and each not in _ALWAYS]
            named = cell.column in ("others", "LoRA") and flags
            what = f"{told} (`{' '.join(flags)}`)" if named else told
            rows.setdefault(cell.client, {}).setdefault(cell.column, []).append(what)
            if cell.how != "losses":
                # A resumed run is compared with one that was not interrupted, whose bits are FSDP2's.
                rows[cell.client].setdefault(COLUMNS[0], ["same bits"])
    lines = [["client", *COLUMNS]]
    for client, cells in rows.items():
        lines.append([client, *("; ".join(dict.fromkeys(cells.get(column, []))) for column in COLUMNS)])
    return pages.table(lines, ["---"])


def main(arguments: Sequence[str]) -> None:
    """Write the table of docs/guides/from-fsdp2.md from the file that `test_fsdp2_cells.py` has written."""
    said = dict(map(json.loads, Path(arguments[0]).read_text(encoding="utf-8").splitlines()))
    pages.fill(PAGE, {"table of FSDP2's clients": table(said)}, gap="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
