"""Run programs as torchrun would, with each rank a fork of this process, which has imported the clients: `server.py`.

It reads a line for each run, `{"ranks": 2, "argv": ["/a/program.py", "an argument"], "env": {}}`, and writes one,
`{"output": ..., "errors": ..., "status": ...}`. So a run takes no imports, and with `flatparam run` in front of this
program it is one of flatparam's.
"""

import contextlib
import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

for name in ("accelerate", "peft", "transformers", "trl", "lightning"):
    # What is not here is not asked for.
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments  # noqa: F401
with contextlib.suppress(ImportError):
    from trl import DPOTrainer, RewardTrainer, SFTTrainer  # noqa: F401
# Each optimizer imports the compiler.
importlib.import_module("torch._dynamo")


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def rank_of(number: int, port: int, asked: dict[str, Any], folder: Path) -> None:
    """Be a rank: run the program, and end this process."""
    status = 1
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}-{number}", os.O_WRONLY), descriptor)
    try:
        ranks = str(asked["ranks"])
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="run")
        os.environ.update(asked.get("env", {}))
        sys.argv[:] = asked["argv"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo may be about to end the process in another way.
    os._exit(status)


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a program, and return what its ranks print; the first rank that fails ends the others."""
    port = free_port()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        left = {}
        for number in range(asked["ranks"]):
            for name in ("out", "err"):
                (folder / f"{name}-{number}").touch()
            child = os.fork()
            if not child:
                rank_of(number, port, asked, folder)
            left[child] = number
        failed: list[int] = []
        while left:
            child, status = os.wait()
            number = left.pop(child)
            if status:
                failed.append(number)
                for other in left:
                    os.kill(other, 9)
        texts = {
            name: [(folder / f"{name}-{number}").read_text() for number in range(asked["ranks"])]
            for name in ("out", "err")
        }
    errors = texts["err"][failed[0]] if failed else ""
    return {"output": "".join(texts["out"]), "errors": errors, "status": int(bool(failed))}


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
