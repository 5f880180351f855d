"""A trainer on two ranks and a generator in a process of its own, in a loop of reinforcement learning on this machine.

In each round the generator writes some texts after each prompt with the newest weights, and rewards each; the trainer
prefers those that are better than the mean of their prompt (the loss of GRPO with one step for each group of texts: the
mean of -advantage x log-probability; Shao et al., "DeepSeekMath", 2024, section 4.1), and publishes. All the time the
generator answers a question in between, always with a whole version.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import attrs
import torch
import torch.nn.functional as F
from gpt.model import Block
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel, Mailbox, Publisher, Receiver
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_comm.testing import PATIENCE, run_processes

from .job import batches, make, pretrained

__all__ = ["Loop", "Outcome", "run_loop"]

PROMPTS: Final = 4
TEXTS: Final = 8
"""For each prompt."""
PROMPT_NBYTES: Final = 16
TEXT_NBYTES: Final = 24
QUESTION: Final = b"def answer(self):\n    "
WAIT_S: Final = 0.002


@attrs.frozen
class Loop:
    """What is done."""

    size: str = "tiny"
    rounds: int = 20
    rate: float = 1e-6
    pretraining: int = 50


@attrs.frozen
class Outcome:
    """What came of it."""

    syncs: int
    nbytes: int
    """Sent by all ranks, of all versions."""
    dense_nbytes: int
    publish_s: float
    """Of all calls of `publish()`."""
    receive_s: float
    """Of all calls of `receive()` that brought a version."""
    seconds: float
    answers: int
    versions_answered_with: int
    longest_answer_s: float
    rewards: tuple[float, float]
    """The mean of the first round and of the last."""


def run_loop(loop: Loop) -> Outcome:
    """Run it; the generator is a process that is started first, and answers as soon as there is a version."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(pretrained(loop.size, loop.pretraining).state_dict(), folder / "start.pt")
        generator = multiprocessing.get_context("spawn").Process(target=_generate, args=(folder, loop))
        generator.start()
        start = time.perf_counter()
        try:
            trainer, *_ = run_processes(2, _train, folder, loop, timeout=PATIENCE, pg_timeout=PATIENCE)
            seconds = time.perf_counter() - start
            (folder / "over").touch()
            generator.join()
        finally:
            if generator.is_alive():
                generator.kill()
        told = json.loads((folder / "generator.json").read_text(encoding="utf-8"))
    return Outcome(seconds=seconds, **trainer, **told)


# The generator


@torch.no_grad()
def _generate(folder: Path, loop: Loop) -> None:
    torch.set_num_threads(1)
    model = make(loop.size).bfloat16().eval()
    receiver = Receiver(model, Mailbox(folder / "weights"))
    sampler = torch.Generator().manual_seed(7)
    answers, longest, receive_s, versions = 0, 0.0, 0.0, set()
    while not (folder / "over").exists():
        start = time.perf_counter()
        is_new = receiver.receive()
        receive_s += (time.perf_counter() - start) if is_new else 0
        if not receiver.version:
            time.sleep(WAIT_S)
            continue
        if is_new and receiver.version <= loop.rounds:
            _write(folder / f"texts-{receiver.version}.json", _texts(model, loop, receiver.version, sampler))
        question = torch.tensor([list(QUESTION)])
        start = time.perf_counter()
        _continued(model, question, 8, sampler)
        longest = max(longest, time.perf_counter() - start)
        answers += 1
        versions.add(receiver.version)
    told = {
        "receive_s": receive_s,
        "answers": answers,
        "versions_answered_with": len(versions),
        "longest_answer_s": longest,
    }
    _write(folder / "generator.json", told)


def _texts(model: nn.Module, loop: Loop, version: int, sampler: torch.Generator) -> Any:
    prompts = batches(loop.size, PROMPTS).training_part(5000 + version, 0, 1).tokens[:, :PROMPT_NBYTES]
    written = _continued(model, prompts.repeat_interleave(TEXTS, 0), TEXT_NBYTES, sampler)
    return {"tokens": written.tolist(), "rewards": [_reward(row[PROMPT_NBYTES:]) for row in written.tolist()]}


def _reward(text: list[int]) -> float:
    """The share of lower-case letters: something that is easily judged."""
    return sum(97 <= byte <= 122 for byte in text) / len(text)


def _continued(model: nn.Module, tokens: Tensor, nbytes: int, sampler: torch.Generator) -> Tensor:
    for _ in range(nbytes):
        chances = torch.softmax(model(tokens)[:, -1].float(), -1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=sampler)], 1)
    return tokens


# The trainer


def _train(world: Collectives, folder: Path, loop: Loop) -> dict[str, Any]:
    torch.set_num_threads(1)
    plain = make(loop.size)
    plain.load_state_dict(torch.load(folder / "start.pt"))
    model = FullyShardedDataParallel(plain, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.rate)
    publisher = Publisher(model, Mailbox(folder / "weights"), dtype=torch.bfloat16)
    nbytes = dense_nbytes = 0
    publish_s, rewards = 0.0, []
    for number in range(loop.rounds + 1):
        start = time.perf_counter()
        published = publisher.publish()
        publish_s += time.perf_counter() - start
        nbytes, dense_nbytes = nbytes + published.nbytes, dense_nbytes + published.dense_nbytes
        if number == loop.rounds:
            break
        texts = world.exchange(_read(folder / f"texts-{published.version}.json") if world.rank == 0 else None)[0]
        rewards.append(sum(texts["rewards"]) / len(texts["rewards"]))
        _loss(model, texts, world.rank, world.size).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        optimizer.zero_grad()
    return {
        "syncs": publisher.version,
        "nbytes": nbytes,
        "dense_nbytes": dense_nbytes,
        "publish_s": publish_s,
        "rewards": (rewards[0], rewards[-1]),
    }


def _loss(model: nn.Module, texts: Any, rank: int, size: int) -> Tensor:
    """The loss of this rank's part of the texts."""
    tokens = torch.tensor(texts["tokens"])
    rewards = torch.tensor(texts["rewards"]).view(-1, TEXTS)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    own, mine = tokens.chunk(size)[rank], advantages.view(-1).chunk(size)[rank]
    scores = model(own[:, :-1])[:, PROMPT_NBYTES - 1 :]
    targets = own[:, PROMPT_NBYTES:]
    chances = -F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return -(mine[:, None] * chances).mean()


def _write(path: Path, content: Any) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


def _read(path: Path) -> Any:
    while not path.exists():
        time.sleep(WAIT_S)
    return json.loads(path.read_text(encoding="utf-8"))
