"""QLoRA as it comes: weights of bitsandbytes in 4 bits with their default storage, and adapters of PEFT."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flatparam import Mailbox, Publisher, Receiver, ShardedEMA
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes, run_threads

if any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "transformers", "peft")):
    pytest.skip("it takes bitsandbytes, transformers and peft", allow_module_level=True)

import bitsandbytes as bnb

from docs.test_examples import losses_in, run

from . import quantised
from .quantised import RANKS, trained, whole

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora and whole embeddings": {"modules_to_save": ["embed_tokens", "norm"]},
}


def quantised_nbytes() -> int:
    """The bytes of all weights in 4 bits: half a byte for each of their elements."""
    return sum(each.numel() for each in whole().parameters() if each.dtype == torch.uint8)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
def test_losses_are_those_of_one_process(adapter: str, use_orig_params: bool) -> None:
    """Two ranks have, bit for bit, the losses of one process, and keep half of the quantised bytes each."""
    settings = ADAPTERS[adapter]
    expected = quantised.losses(whole(**settings))
    options = {"use_orig_params": use_orig_params}
    found = run_threads(RANKS, trained, quantised.ours, settings, options)
    for rank, (losses, nbytes) in enumerate(found):
        assert losses == [of_ranks[rank] for of_ranks in expected]
        assert nbytes == quantised_nbytes() // RANKS


@pytest.mark.processes
@pytest.mark.parametrize("shard", ["ours", "ours_in_place"])
def test_in_processes(shard: str) -> None:
    """The same in processes over gloo, by the wrapper and by the function."""
    expected = quantised.losses(whole())
    for rank, found in enumerate(run_processes(RANKS, trained, getattr(quantised, shard), {}, {})):
        assert found == ([of_ranks[rank] for of_ranks in expected], quantised_nbytes() // RANKS)


def evaluating(world: Collectives | None, use_orig_params: bool) -> list[Any]:
    """Train, and answer after each step."""
    model = whole()
    if world is None:
        for layer in model.modules():
            # On a CPU with AVX512-BF16 it would compute answers in bf16, and train no more.
            if isinstance(layer, bnb.nn.Linear4bit):
                layer.support_avx512bf16_for_cpu = False
    else:
        for layer in model.modules():
            # As it is there, so that this is tested everywhere.
            if isinstance(layer, bnb.nn.Linear4bit):
                layer.support_avx512bf16_for_cpu = True
        model = quantised.ours(model, use_orig_params=use_orig_params)
    answers: list[Any] = []

    def answer() -> None:
        model.eval()
        with torch.no_grad():
            answers.append(model(input_ids=torch.tensor([[1, 2, 3]])).logits.tolist())
        model.train()

    return [quantised.losses(model, None if world is None else world.rank, answer), answers]


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
def test_evaluating_between_steps(use_orig_params: bool) -> None:
    """Layers keep their bytes where bitsandbytes would repack them; answers between steps are those of one process."""
    losses, answers = evaluating(None, use_orig_params)
    found = run_threads(RANKS, evaluating, use_orig_params)
    assert found == [[[of_ranks[rank] for of_ranks in losses], answers] for rank in range(RANKS)]


def publishing(world: Collectives, folder: Path, use_orig_params: bool) -> list[Any]:
    """Train, and publish the average of the adapter after each step."""
    model = quantised.ours(whole(), use_orig_params=use_orig_params)
    averages = ShardedEMA(model, decay=0.5)
    publisher = Publisher(model, Mailbox(folder), only=lambda name: "lora_" in name)

    def publish() -> None:
        averages.update()
        with averages.applied(model):
            publisher.publish()

    return quantised.losses(model, world.rank, publish)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
def test_an_average_reaches_a_generator_with_the_same_base(use_orig_params: bool, tmp_path: Path) -> None:
    """Only the adapter is published; with its own base in 4 bits the generator answers as one process's average."""
    one = whole()
    averages: dict[str, torch.Tensor] = {}

    def average() -> None:
        for name, parameter in one.named_parameters():
            if parameter.requires_grad:
                now = parameter.detach().clone()
                averages[name] = averages[name].lerp(now, 0.5) if name in averages else now

    expected = quantised.losses(one, after_step=average)
    found = run_threads(RANKS, publishing, tmp_path, use_orig_params)
    assert found == [[of_ranks[rank] for of_ranks in expected] for rank in range(RANKS)]
    generator = whole()
    receiver = Receiver(generator, Mailbox(tmp_path), strict=False)
    assert receiver.receive()
    assert receiver.version == quantised.STEPS
    one.load_state_dict(averages, strict=False)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(generator(input_ids=tokens).logits, one(input_ids=tokens).logits)


@pytest.mark.processes
def test_the_example(tmp_path: Path) -> None:
    """`examples/qlora.py` trains, and publishes its adapter: two matrices for each of two projections in two layers."""
    (printed, _) = run("qlora", tmp_path)
    losses = losses_in(printed)
    assert losses[-1] < losses[0]
    assert re.search(r"qlora-adapter has 8 tensors, [\d,]+ bytes", printed), printed
