"""The program of the guide to fine-tuning: from local files to a generator that has each version of the average."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

if any(importlib.util.find_spec(name) is None for name in ("transformers", "peft")):
    pytest.skip("it takes transformers and peft", allow_module_level=True)

from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from flatparam import CheckpointError, ShardingStrategy, load_pretrained
from flatparam_comm import Collectives
from flatparam_comm.testing import PATIENCE, run_threads

from . import adapters
from .programs import fine_tuning as story
from .running import PROGRAMS, output_of

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def expected() -> tuple[list[list[float]], list[str]]:
    """The losses of the ranks, and the answers, of one process that does all of it."""
    torch.set_num_threads(1)
    model = story.make()
    weights = AutoModelForCausalLM.from_pretrained(story.FOLDER).state_dict()
    model.load_state_dict({story.in_the_model(name): value for name, value in weights.items()}, strict=False)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters("default", init_lora_weights=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    losses, answers = [], []
    for step in range(story.STEPS):
        tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(step))
        of_ranks = [model(input_ids=part, labels=part).loss for part in tokens.chunk(2)]
        torch.stack(of_ranks).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append([loss.item() for loss in of_ranks])
        generator = story.make().bfloat16().eval()
        generator.load_state_dict(average.module.state_dict())
        answer: Any = generator.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
        answers.append(" ".join(map(str, answer[0].tolist())))
    return losses, answers


@pytest.fixture
def somebodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a Llama in several files of safetensors."""
    monkeypatch.chdir(tmp_path)
    adapters.llama().save_pretrained(tmp_path / story.FOLDER, max_shard_size="100KB")
    assert len(list((tmp_path / story.FOLDER).glob("*.safetensors"))) > 1
    return tmp_path / story.FOLDER


@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("somebodys")
def test_from_local_files_to_a_generator() -> None:
    """Two ranks have the losses of one process, and the generator gives its answers with every version, to the bit.

    Changes of the frozen model are no bytes: each version after the first is less than a twentieth of it.
    """
    program = PROGRAMS / "fine_tuning.py"
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen([sys.executable, str(program), "generate"], env=quiet) as generator:
        try:
            lines = [line.split() for line in output_of(*TORCHRUN, program).splitlines()]
            generator.wait(PATIENCE)
        finally:
            generator.kill()
    losses, answers = expected()
    rows = [words[1:] for words in lines if words[:1] == ["loss"]]
    assert {(int(rank), int(step)): float(loss) for rank, step, loss, _ in rows} == {
        (rank, step): of_ranks[rank] for step, of_ranks in enumerate(losses) for rank in range(2)
    }
    written = [Path(f"answer-{number}.txt").read_text() for number in range(1, story.STEPS + 1)]
    assert written == answers
    sizes = {int(step): int(nbytes) for rank, step, _, nbytes in rows if rank == "0"}
    assert all(nbytes < sizes[0] / 20 for step, nbytes in sizes.items() if step)


def test_rotary_buffers_are_those_of_from_pretrained(somebodys: Path) -> None:
    """Buffers that are in no file have the values that transformers gives them, and so have the logits, to the bit."""
    plain = AutoModelForCausalLM.from_pretrained(somebodys)

    def program(world: Any) -> Any:
        model = load_pretrained(adapters.llama, somebodys)
        return dict(model.named_buffers()), model(input_ids=adapters.QUESTION).logits.detach()

    for buffers, logits in run_threads(2, program):
        own = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in buffers.items()}
        assert {name for name, _ in plain.named_buffers()} == set(own)
        assert all(torch.equal(own[name], value) for name, value in plain.named_buffers())
        assert torch.equal(logits, plain(input_ids=adapters.QUESTION).logits)


def test_rotary_buffers_of_a_model_on_meta_are_refused(somebodys: Path) -> None:
    """A model that was made on the meta device has lost what its rotary buffers were: the error names them, and why."""
    config = AutoModelForCausalLM.from_pretrained(somebodys).config

    def program(world: Any) -> None:
        with torch.device("meta"):
            hollow = AutoModelForCausalLM.from_config(config)
        with pytest.raises(CheckpointError, match=r"rotary_emb\.inv_freq.*pass the function that makes the model"):
            load_pretrained(hollow, somebodys)

    run_threads(2, program)


def small(kind: str) -> Any:
    """The configuration of a small model."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, dict[str, Any]] = {
        "vit": {"image_size": 32, "patch_size": 8},
        "gpt_neox": {"vocab_size": 64},
        "bert": {"vocab_size": 64},
        "t5": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "mixtral": {"vocab_size": 64, "num_key_value_heads": 2, "num_local_experts": 4},
        "qwen3_moe": {
            "vocab_size": 64,
            "num_key_value_heads": 2,
            "num_experts": 11,
            "head_dim": 8,
            "moe_intermediate_size": 8,
        },
        "deepseek_v3": {
            "vocab_size": 64,
            "num_key_value_heads": 4,
            "n_routed_experts": 12,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 8,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
        "jamba": {
            "vocab_size": 64,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    }
    return AutoConfig.for_model(kind, **(sizes | more[kind]))


@pytest.mark.parametrize(
    ("kind", "maker"),
    [
        ("vit", AutoModelForImageClassification),
        ("gpt_neox", AutoModelForCausalLM),
        ("t5", AutoModelForSeq2SeqLM),
        ("bert", AutoModelForMaskedLM),
    ],
)
def test_the_state_is_that_of_from_pretrained(kind: str, maker: Any, tmp_path: Path) -> None:
    """Also for models whose tensors have other names in files; ranks read each byte once, and buffers are computed."""
    torch.manual_seed(0)
    config = small(kind)
    maker.from_config(config).save_pretrained(tmp_path, max_shard_size="20KB")
    expected = maker.from_pretrained(tmp_path, dtype=torch.float32)

    def load(world: Collectives) -> Any:
        model, report = load_pretrained(
            lambda: maker.from_config(config), tmp_path, strict=True, output_loading_info=True
        )
        return model.state_dict(), dict(model.module.named_buffers()), report

    results = run_threads(2, load)
    for state, buffers, _ in results:
        for found, wanted in ((state, expected.state_dict()), (buffers, dict(expected.named_buffers()))):
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert sum(report.nbytes_read for _, _, report in results) == results[0][2].nbytes


def test_a_base_model_is_loaded_beneath_a_head(tmp_path: Path) -> None:
    """The files of a model without a head have names without its prefix; the head is missing, and begins anew."""
    torch.manual_seed(0)
    config = small("bert")
    base = AutoModel.from_config(config)
    base.save_pretrained(tmp_path)

    def rank(world: Collectives) -> Any:
        model, report = load_pretrained(
            lambda: AutoModelForSequenceClassification.from_config(config), tmp_path, output_loading_info=True
        )
        return model.state_dict(), report

    with pytest.warns(UserWarning, match=r"lacks 'classifier\.weight', 'classifier\.bias'"):
        results = run_threads(2, rank)
    for state, report in results:
        assert report.missing_keys == ("classifier.weight", "classifier.bias")
        assert all(torch.equal(state[f"bert.{name}"], value) for name, value in base.state_dict().items())


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "qwen3_moe", "jamba"])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_experts_are_joined_while_they_are_read(kind: str, strategy: ShardingStrategy, tmp_path: Path) -> None:
    """Experts are many tensors in files and one in memory: the state is that of `from_pretrained`, each byte read once."""
    torch.manual_seed(0)
    config = small(kind)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="30KB")
    names = [name for path in tmp_path.glob("*.safetensors") for name in load_file(path)]
    assert not any("gate_up_proj" in name for name in names)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()

    def rank(world: Collectives) -> Any:
        model, report = load_pretrained(
            lambda: AutoModelForCausalLM.from_config(config),
            tmp_path,
            strict=True,
            output_loading_info=True,
            sharding_strategy=strategy,
        )
        return model.state_dict(), report

    results = run_threads(3, rank)
    for state, report in results:
        assert set(state) == set(expected)
        assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
        assert report.missing_keys == report.unexpected_keys == ()
    assert sum(report.nbytes_read for _, report in results) == results[0][1].nbytes


def test_a_part_of_an_expert_that_is_not_there(tmp_path: Path) -> None:
    """If a file lacks an expert, the error says so by the shape of what the others are joined to."""
    config = small("mixtral")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})

    def rank(world: Collectives) -> None:
        with pytest.raises(
            CheckpointError,
            match=r"1.mlp.experts.down_proj': expected shape \(4, 32, 48\), found \(3, 32, 48\)",
        ):
            load_pretrained(lambda: AutoModelForCausalLM.from_config(config), tmp_path)

    run_threads(2, rank)
