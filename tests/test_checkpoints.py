"""Drafter checkpoints of other layouts: reading, writing, round trips and refusals, all on tiny models built here."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from adaflash_hf.checkpoints import LAYOUTS, convert, reading, save_drafter
from adaflash_hf.configuration_adaflash import AdaFlashConfig, AdaFlashGenerationConfig
from adaflash_hf.errors import AdaFlashValueError
from adaflash_hf.modeling_adaflash import AdaFlashDrafter


BLOCK, WIDTH, VOCAB, LAYER_IDS = 4, 32, 96, [0, 2, 3]
HEAD = {"kind": "length", "hidden_size": WIDTH, "block_size": BLOCK, "bottleneck_size": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
THEIR_HEAD = {"down.": "down.", "res.": "res.0.", "out.": "out."}


def make_drafter(**values) -> AdaFlashDrafter:
    defaults = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": LAYER_IDS,
        "num_target_layers": 4,
    }
    drafter = AdaFlashDrafter(AdaFlashConfig(**(defaults | values))).eval()
    randomize(drafter)
    return drafter


def randomize(model) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Norms included, so that a norm under the wrong name shows.
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + 0.1


def block_inputs(context: int = 9) -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        "noise_embeds": torch.randn(1, BLOCK, WIDTH, generator=generator),
        "context_hidden_states": torch.randn(1, context, len(LAYER_IDS) * WIDTH, generator=generator),
        "position_ids": torch.arange(context + BLOCK)[None],
    }


@torch.no_grad()
def draft(model, **inputs) -> torch.Tensor:
    inputs = inputs or block_inputs()
    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(inputs["context_hidden_states"].shape[1])
    return model(**inputs, cache=cache).last_hidden_state


def assert_same(loaded, original) -> None:
    theirs, ours = loaded.state_dict(), original.state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype
        assert torch.equal(theirs[name], tensor), name
    torch.testing.assert_close(draft(loaded), draft(original), rtol=0, atol=0)
    assert not loaded.training


def body(config) -> dict:
    """A Qwen3 configuration as z-lab and speculators write it, with the legacy RoPE keys."""
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": config.layer_types,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def write(folder, config: dict, tensors: dict):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def zlab_tensors(drafter) -> dict:
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith("length_head."):
            part = name.removeprefix("length_head.")
            ours = next(prefix for prefix in THEIR_HEAD if part.startswith(prefix))
            name = "thresh_head_two_model." + THEIR_HEAD[ours] + part.removeprefix(ours)
        tensors[name] = tensor
    return tensors


def zlab_config(drafter) -> dict:
    config = drafter.config
    dflash = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    if config.length_head is not None:
        dflash |= {"use_thresh_head_two_model": True, "thresh_head_bottleneck_dim": 8, "thresh_head_direct_len": True}
    return body(config) | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": dflash,
        "dtype": "float32",
    }


def zlab(folder, drafter, **changes):
    return write(folder, zlab_config(drafter) | changes, zlab_tensors(drafter))


def speculators_config(drafter, **changes) -> dict:
    config = drafter.config
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not config.sliding_window_causal,
        "sample_from_anchor": config.label_convention == "sample_from_anchor",
        "transformer_layer_config": body(config),
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "org/target"}},
        "dtype": "float32",
    } | changes


def speculators_tensors(drafter) -> dict:
    tensors = dict(drafter.state_dict())
    rows = drafter.config.draft_vocab_size or VOCAB
    tensors |= {"embed_tokens.weight": torch.zeros(VOCAB, WIDTH), "lm_head.weight": torch.zeros(rows, WIDTH)}
    if "draft_token_ids" in tensors:
        ids = tensors.pop("draft_token_ids")
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["top", "nested", "both"])
def test_zlab(tmp_path, place):
    drafter = make_drafter()
    config = zlab_config(drafter)
    if place != "top":
        config["dflash_config"]["block_size"] = BLOCK
    if place == "nested":
        del config["block_size"]
    loaded = AdaFlashDrafter.from_pretrained(write(tmp_path / "z", config, zlab_tensors(drafter)))
    assert_same(loaded, drafter)
    assert loaded.config.target_layer_ids == LAYER_IDS
    assert loaded.config.num_target_layers == 4
    assert loaded.config.label_convention == "fill_in"
    assert loaded.config.use_qk_norm
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.config.rope_parameters["rope_theta"] == 500000.0
    assert loaded.name_or_path == str(tmp_path / "z")


def test_zlab_names_may_be_prefixed(tmp_path):
    drafter = make_drafter()
    tensors = {f"model.{name}": tensor for name, tensor in zlab_tensors(drafter).items()}
    assert_same(AdaFlashDrafter.from_pretrained(write(tmp_path, zlab_config(drafter), tensors)), drafter)


def test_adaflash_length_head(tmp_path):
    drafter = make_drafter(length_head=HEAD)
    loaded = AdaFlashDrafter.from_pretrained(zlab(tmp_path, drafter))
    assert_same(loaded, drafter)
    hidden = torch.randn(3, BLOCK, WIDTH)
    assert torch.equal(loaded.length_head(hidden), drafter.length_head(hidden))


@pytest.mark.parametrize(
    ("changes", "causal"),
    [({}, True), ({"is_causal": False}, False), ({"causal": False}, False), ({"is_causal": None}, True)],
)
def test_zlab_sliding_causality(tmp_path, changes, causal):
    drafter = make_drafter(**MIXED, sliding_window_causal=causal)
    config = zlab_config(drafter)
    (config["dflash_config"] if "causal" in changes else config).update(changes)
    loaded = AdaFlashDrafter.from_pretrained(write(tmp_path, config, zlab_tensors(drafter)))
    assert loaded.config.sliding_window_causal is causal
    assert loaded.config.layer_types == MIXED["layer_types"]
    assert loaded.config.sliding_window == 6
    assert_same(loaded, drafter)
    other = make_drafter(**MIXED, sliding_window_causal=not causal)
    assert not torch.allclose(draft(loaded), draft(other))


def test_zlab_swa_keys(tmp_path):
    drafter = make_drafter(layer_types=["sliding_attention"] * 2, sliding_window=5)
    config = zlab_config(drafter) | {"layer_types": ["full_attention"] * 2, "sliding_window": 9}
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 5}
    loaded = AdaFlashDrafter.from_pretrained(write(tmp_path, config, zlab_tensors(drafter)))
    assert loaded.config.sliding_window == 5
    assert_same(loaded, drafter)


@pytest.mark.parametrize("schema", ["legacy", "parameters", "both"])
def test_rope_schemas(tmp_path, schema):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    drafter = make_drafter(rope_parameters=yarn | {"rope_theta": 20000.0}, max_position_embeddings=256)
    config = zlab_config(drafter)
    if schema != "parameters":
        legacy = {"type" if key == "rope_type" else key: value for key, value in yarn.items()}
        config |= {"rope_theta": 20000.0, "rope_scaling": legacy}
    else:
        del config["rope_theta"], config["rope_scaling"]
    if schema != "legacy":
        config["rope_parameters"] = yarn | {"rope_theta": 20000.0}
    loaded = AdaFlashDrafter.from_pretrained(write(tmp_path, config, zlab_tensors(drafter)))
    assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
    assert_same(loaded, drafter)


@pytest.mark.parametrize("values", [{}, {"label_convention": "sample_from_anchor"}, MIXED])
@pytest.mark.parametrize("causal", [True, False])
def test_speculators(tmp_path, values, causal):
    drafter = make_drafter(**values, num_target_layers=None, sliding_window_causal=causal)
    folder = write(tmp_path, speculators_config(drafter), speculators_tensors(drafter))
    loaded = AdaFlashDrafter.from_pretrained(folder)
    assert_same(loaded, drafter)
    assert loaded.config.target_layer_ids == LAYER_IDS
    assert loaded.config.label_convention == drafter.config.label_convention
    assert loaded.config.sliding_window_causal is causal
    assert loaded.config.draft_vocab_size is None
    assert loaded.config.target_model == "org/target"


def test_speculators_draft_vocabulary(tmp_path):
    drafter = make_drafter(draft_vocab_size=5, num_target_layers=None)
    drafter.draft_token_ids.copy_(torch.tensor([0, 3, 4, 40, 95]))
    folder = write(tmp_path, speculators_config(drafter), speculators_tensors(drafter))
    loaded = AdaFlashDrafter.from_pretrained(folder, dtype=torch.bfloat16)
    assert loaded.draft_token_ids.tolist() == [0, 3, 4, 40, 95]
    assert loaded.draft_token_ids.dtype == torch.int64
    assert_same(AdaFlashDrafter.from_pretrained(folder), drafter)


@pytest.mark.parametrize("layer_types", [["full_attention"] * 2, ["sliding_attention"] * 2, MIXED["layer_types"]])
def test_in_tree_assistant(tmp_path, layer_types):
    config = MuseGlimmerAssistantConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=layer_types,
        sliding_window=6,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        target_layer_ids=LAYER_IDS,
    )
    assistant = MuseGlimmerAssistantModel(config).eval()
    randomize(assistant)
    assistant.save_pretrained(tmp_path)

    loaded = AdaFlashDrafter.from_pretrained(tmp_path, vocab_size=VOCAB)
    assert loaded.config.vocab_size == VOCAB
    assert loaded.config.rope_parameters["rope_theta"] == 500000.0
    assert torch.equal(loaded.fc.weight, assistant.encoder.fc.weight)
    assert torch.equal(loaded.hidden_norm.weight, assistant.encoder.output_norm_enc.weight)
    for name, tensor in assistant.layers.state_dict().items():
        assert torch.equal(loaded.layers.state_dict()[name], tensor), name
    torch.testing.assert_close(draft(loaded), draft(assistant))
    # The layout doesn't hold a vocabulary size; its targets have this one.
    assert AdaFlashDrafter.from_pretrained(tmp_path).config.vocab_size == 202048


def test_sharded(tmp_path):
    drafter = make_drafter(length_head=HEAD)
    drafter.save_pretrained(tmp_path / "ours", max_shard_size="5KB")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert_same(AdaFlashDrafter.from_pretrained(tmp_path / "ours"), drafter)

    folder, tensors, weight_map = tmp_path / "zlab", zlab_tensors(drafter), {}
    write(folder, zlab_config(drafter), tensors)
    (folder / "model.safetensors").unlink()
    for part, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        shard = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(AdaFlashDrafter.from_pretrained(folder), drafter)


def test_dtype(tmp_path, monkeypatch):
    drafter = make_drafter().to(torch.bfloat16)
    folder = zlab(tmp_path, drafter, dtype="bfloat16")
    assert AdaFlashDrafter.from_pretrained(folder).dtype == torch.bfloat16
    assert AdaFlashDrafter.from_pretrained(folder, dtype=torch.float32).dtype == torch.float32
    # Without a key in config.json, the tensors decide.
    assert AdaFlashDrafter.from_pretrained(zlab(tmp_path, drafter, dtype=None)).dtype == torch.bfloat16

    warned = []
    monkeypatch.setattr(reading.logger, "warning_once", warned.append)
    assert AdaFlashDrafter.from_pretrained(folder, dtype="float16").dtype == torch.float16
    assert "float16" in warned[0]


def test_arguments(tmp_path):
    drafter = make_drafter()
    folder = zlab(tmp_path / "repo", drafter)
    assert AdaFlashDrafter.from_pretrained(folder, device_map="cpu").device.type == "cpu"
    assert AdaFlashDrafter.from_pretrained(folder, attn_implementation="eager").config._attn_implementation == "eager"
    assert AdaFlashDrafter.from_pretrained(folder, target_model="org/t").config.target_model == "org/t"
    assert_same(AdaFlashDrafter.from_pretrained(tmp_path, subfolder="repo"), drafter)
    assert_same(AdaFlashDrafter.from_pretrained(folder, config=drafter.config), drafter)
    loaded, info = AdaFlashDrafter.from_pretrained(folder, output_loading_info=True)
    assert_same(loaded, drafter)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with pytest.raises(TypeError, match="nonsense"):
        AdaFlashDrafter.from_pretrained(folder, nonsense=1)
    with pytest.raises(AdaFlashValueError, match="variant"):
        AdaFlashDrafter.from_pretrained(folder, variant="fp16")


def test_generation_config(tmp_path):
    drafter = make_drafter()
    drafter.generation_config.length_rate = 1.3
    drafter.save_pretrained(tmp_path / "ours")
    save_drafter(drafter, tmp_path / "zlab", "zlab")
    for folder in (tmp_path / "ours", tmp_path / "zlab"):
        assert AdaFlashDrafter.from_pretrained(folder).generation_config.length_rate == 1.3
        policy = AdaFlashGenerationConfig(length_rate=2.0)
        loaded = AdaFlashDrafter.from_pretrained(folder, generation_config=policy)
        assert loaded.generation_config.length_rate == 2.0
    # Somebody else's file says how the target samples, which is no business of the drafter.
    (tmp_path / "zlab" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "do_sample": True}))
    assert AdaFlashDrafter.from_pretrained(tmp_path / "zlab").generation_config.temperature is None


# --- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"length_head": HEAD},
        {"attention_bias": True},
        MIXED,
        MIXED | {"sliding_window_causal": False},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}},
    ],
)
def test_zlab_written_round_trip(tmp_path, values):
    drafter = make_drafter(**values)
    save_drafter(drafter, tmp_path, "zlab")
    loaded = AdaFlashDrafter.from_pretrained(tmp_path)
    assert_same(loaded, drafter)
    written = json.loads((tmp_path / "config.json").read_text())
    save_drafter(loaded, tmp_path, "zlab")
    assert json.loads((tmp_path / "config.json").read_text()) == written
    assert_same(AdaFlashDrafter.from_pretrained(tmp_path), drafter)
    for key in ("block_size", "rms_norm_eps", "layer_types", "sliding_window", "sliding_window_causal"):
        assert getattr(loaded.config, key) == getattr(drafter.config, key)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "card.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_zlab_written_layout(tmp_path):
    drafter = make_drafter(**MIXED, length_head=HEAD)
    save_drafter(drafter, tmp_path, "zlab")
    written = json.loads((tmp_path / "config.json").read_text())
    fixture = zlab_config(drafter)
    del fixture["auto_map"]
    assert fixture.items() <= written.items()
    # True would make vLLM's full-attention layers causal.
    assert "is_causal" not in written
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == zlab_tensors(drafter).keys()

    save_drafter(drafter, tmp_path, "zlab", include_length_head=False)
    assert "use_thresh_head_two_model" not in json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    assert not any("head" in name for name in load_file(tmp_path / "model.safetensors"))
    assert AdaFlashDrafter.from_pretrained(tmp_path).length_head is None


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"use_qk_norm": False}, "use_qk_norm"),
        ({"label_convention": "sample_from_anchor"}, "label_convention"),
        ({"draft_vocab_size": 5}, "draft_vocab_size"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"length_head": HEAD | {"kind": "survival"}}, "include_length_head=False"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
    ],
)
def test_zlab_written_refuses(tmp_path, values, key):
    with pytest.raises(AdaFlashValueError, match=key):
        save_drafter(make_drafter(**values), tmp_path / "out", "zlab")
    assert not (tmp_path / "out").exists()


def test_zlab_written_without_survival_head(tmp_path):
    drafter = make_drafter(length_head=HEAD | {"kind": "survival"})
    save_drafter(drafter, tmp_path, "zlab", include_length_head=False)
    assert AdaFlashDrafter.from_pretrained(tmp_path).length_head is None


@pytest.mark.parametrize("start", ["zlab", "speculators", "ours"])
def test_own_layout_round_trip(tmp_path, start):
    drafter = make_drafter(**MIXED, num_target_layers=None)
    if start == "zlab":
        folder = zlab(tmp_path / "a", drafter)
    elif start == "speculators":
        folder = write(tmp_path / "a", speculators_config(drafter), speculators_tensors(drafter))
    else:
        folder = tmp_path / "a"
        drafter.save_pretrained(folder)
    # In place, over the file that the loaded tensors may still be mapped from.
    AdaFlashDrafter.from_pretrained(folder).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "adaflash"
    assert_same(AdaFlashDrafter.from_pretrained(folder), drafter)


# --- published repos, as they are -----------------------------------------------------------------------------------

_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_V1 = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
}
# Keys of published config.json files, and their values as far as they are known (block size and mask token of the
# Llama drafter are from memory).
PUBLISHED = {
    "z-lab/Qwen3-8B-DFlash-b16": _V1
    | {
        "block_size": 16,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 36,
        "rope_theta": 1000000,
        "vocab_size": 151936,
    },
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": _V1
    | {
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 12, 23, 34, 45]},
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "layer_types": ["full_attention"] * 8,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "num_target_layers": 48,
        "rope_theta": 10000000,
        "vocab_size": 151936,
    },
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": _V1
    | {
        "block_size": 10,
        "dflash_config": {"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]},
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": _LLAMA3,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    "z-lab/Qwen3.6-27B-DFlash": _V1
    | {
        "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 64,
        "rope_theta": 10000000,
        "sliding_window": 2048,
        "use_sliding_window": True,
        "vocab_size": 248320,
    },
    # No layer_types, no num_target_layers, the transformers 5 schema of RoPE.
    "z-lab/Qwen3.5-122B-A10B-DFlash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 3072,
        "num_hidden_layers": 6,
        "vocab_size": 248320,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9216,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
        "max_position_embeddings": 262144,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 248077,
            "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45],
        },
    },
}
PUBLISHED["AdaFlash/Qwen3-8B-AdaFlash"] = PUBLISHED["z-lab/Qwen3-8B-DFlash-b16"] | {
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "use_thresh_head_two_model": True,
        "thresh_head_bottleneck_dim": 256,
        "thresh_head_direct_len": True,
    }
}


def published_tensors(config: dict) -> dict:
    """The names of a published v1 state dict, in a width that fits a test."""
    width, heads, key_heads, size = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    inner = config["intermediate_size"]
    shapes = {
        "fc.weight": (width, width * len(config["dflash_config"]["target_layer_ids"])),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (heads * size, width),
            "self_attn.k_proj": (key_heads * size, width),
            "self_attn.v_proj": (key_heads * size, width),
            "self_attn.o_proj": (width, heads * size),
            "self_attn.q_norm": (size,),
            "self_attn.k_norm": (size,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
    if config["dflash_config"].get("use_thresh_head_two_model"):
        bottleneck = config["dflash_config"]["thresh_head_bottleneck_dim"]
        shapes |= {
            "thresh_head_two_model.down.weight": (bottleneck, 2 * width),
            "thresh_head_two_model.down.bias": (bottleneck,),
            "thresh_head_two_model.res.0.weight": (bottleneck, bottleneck),
            "thresh_head_two_model.res.0.bias": (bottleneck,),
            "thresh_head_two_model.out.weight": (1, bottleneck),
            "thresh_head_two_model.out.bias": (1,),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) * 0.1 for name, shape in shapes.items()}


@pytest.mark.parametrize("repo", PUBLISHED)
def test_published(tmp_path, repo):
    small = {"hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = PUBLISHED[repo] | small | {"head_dim": 8}
    tensors = published_tensors(config)
    drafter = AdaFlashDrafter.from_pretrained(write(tmp_path / "a", config, tensors))
    read, inner = drafter.config, config["dflash_config"]
    assert read.block_size == config.get("block_size", inner.get("block_size"))
    assert read.mask_token_id == inner["mask_token_id"] and read.target_layer_ids == inner["target_layer_ids"]
    assert read.num_target_layers == config.get("num_target_layers")
    assert read.vocab_size == config["vocab_size"] and drafter.dtype == torch.bfloat16
    assert read.layer_types == config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    assert read.sliding_window == (config["sliding_window"] if "sliding_attention" in read.layer_types else None)
    assert (read.rope_parameters["rope_type"] == "llama3") == ("LLaMA3.1" in repo)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    assert read.rope_parameters["rope_theta"] == theta
    assert (drafter.length_head is not None) == repo.startswith("AdaFlash/")
    assert sum(p.numel() for p in drafter.parameters()) == sum(t.numel() for t in tensors.values())

    convert(tmp_path / "a", tmp_path / "b", "zlab")
    back = load_file(tmp_path / "b" / "model.safetensors")
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)


# --- converting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "values",
    [{}, MIXED | {"sliding_window_causal": False}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}],
)
def test_convert_round_trip(tmp_path, layout, values):
    drafter = make_drafter(**values, target_model="org/target", bos_token_id=2)
    drafter.generation_config.num_assistant_tokens = 2
    drafter.card.training_data = "Some words."
    drafter.save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", layout)
    convert(tmp_path / "b", tmp_path / "c", "adaflash", target_model="org/target")
    loaded = AdaFlashDrafter.from_pretrained(tmp_path / "c")
    assert_same(loaded, drafter)
    ours, theirs = drafter.config.to_dict(), loaded.config.to_dict()
    left_out = {"max_window_layers", "auto_map", "dtype", "_name_or_path", "architectures", "transformers_version"}
    assert {key: theirs[key] for key in ours.keys() - left_out} == {key: ours[key] for key in ours.keys() - left_out}
    assert loaded.generation_config.num_assistant_tokens == 2
    assert loaded.card.training_data == "Some words."


@pytest.mark.parametrize("start", [name for name in LAYOUTS if name != "adaflash"])
@pytest.mark.parametrize("end", [name for name in LAYOUTS if name != "adaflash"])
def test_convert_between_foreign_layouts(tmp_path, start, end):
    drafter = make_drafter()
    save_drafter(drafter, tmp_path / "a", start)
    convert(tmp_path / "a", tmp_path / "b", end)
    assert_same(AdaFlashDrafter.from_pretrained(tmp_path / "b"), drafter)


@pytest.mark.parametrize("tied", [False, True])
def test_convert_draft_vocabulary_to_speculators(tmp_path, tied):
    drafter = make_drafter(draft_vocab_size=5, label_convention="sample_from_anchor")
    drafter.draft_token_ids.copy_(torch.tensor([0, 3, 4, 40, 95]))
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, tie_word_embeddings=tied
    )
    target = LlamaForCausalLM(config)
    target.save_pretrained(tmp_path / "target", max_shard_size="5KB" if tied else "1GB")
    save_drafter(drafter, tmp_path / "a", "speculators", target=tmp_path / "target")
    written = load_file(tmp_path / "a" / "model.safetensors")
    rows = target.get_output_embeddings().weight[[0, 3, 4, 40, 95]]
    assert torch.equal(written["lm_head.weight"], rows) and written["d2t"].tolist() == [0, 2, 2, 37, 91]
    assert written["t2d"].nonzero().flatten().tolist() == [0, 3, 4, 40, 95] and "draft_token_ids" not in written
    assert_same(AdaFlashDrafter.from_pretrained(tmp_path / "a"), drafter)

    with pytest.raises(AdaFlashValueError, match="pass `target`"):
        save_drafter(drafter, tmp_path / "b", "speculators")
    drafter.draft_token_ids.copy_(torch.tensor([3, 0, 4, 40, 95]))
    with pytest.raises(AdaFlashValueError, match="ascending"):
        save_drafter(drafter, tmp_path / "b", "speculators", target=tmp_path / "target")
    assert not (tmp_path / "b").exists()


def test_in_tree_reads_what_was_written(tmp_path):
    drafter = make_drafter(layer_types=["sliding_attention"] * 2, sliding_window=6, sliding_window_causal=False)
    save_drafter(drafter, tmp_path, "transformers")
    assistant, info = MuseGlimmerAssistantModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(draft(assistant.eval()), draft(drafter))


@pytest.mark.parametrize(
    ("layout", "values", "key"),
    [
        ("speculators", {"use_qk_norm": False}, "use_qk_norm"),
        ("speculators", {"length_head": HEAD}, "length_head.*no_include_length_head"),
        ("transformers", {"use_qk_norm": False}, "use_qk_norm"),
        ("transformers", {"label_convention": "sample_from_anchor"}, "label_convention"),
        ("transformers", {"draft_vocab_size": 5}, "draft_vocab_size"),
        ("transformers", {"attention_bias": True}, "attention_bias"),
        ("transformers", {"length_head": HEAD}, "length_head.*no_include_length_head"),
        ("transformers", MIXED, "sliding_window_causal.*both directions"),
        ("gguf", {}, "gguf.*adaflash, zlab, speculators, transformers"),
    ],
)
def test_convert_refuses(tmp_path, layout, values, key):
    drafter = make_drafter(**values)
    drafter.save_pretrained(tmp_path / "a")
    with pytest.raises(AdaFlashValueError, match=key) as caught:
        convert(tmp_path / "a", tmp_path / "out", layout)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_convert_keeps_out_of_used_folders(tmp_path):
    make_drafter().save_pretrained(tmp_path / "a")
    with pytest.raises(AdaFlashValueError, match="isn't empty"):
        convert(tmp_path / "a", tmp_path / "a", "zlab")


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"block_size": 8, "dflash_config.block_size": BLOCK}, "block_size"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"dflash_config.mask_token_id": None}, "mask_token_id"),
        ({"dflash_config.mask_token_id": VOCAB}, "mask_token_id"),
        ({"dflash_config.target_layer_ids": None}, "target_layer_ids"),
        ({"dflash_config.target_layer_ids": [0, 2, 4]}, "target_layer_ids"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2.*architectures.*needs.*convolutions.*selector"),
        ({"dflash_config.conv_kernel_size": 2}, "DFlash2.*conv_kernel_size"),
        ({"dflash_config.projector_type": "domino"}, "Domino.*projector_type.*needs a GRU head"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark.*architectures.*needs a Markov head"),
        ({"markov_rank": 256}, "DSpark.*markov_rank"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"model_type": "llama"}, "model_type"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
        ({"dflash_config.final_logit_softcapping": 20.0}, "final_logit_softcapping"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_theta"),
        ({"is_causal": True}, "is_causal"),
        ({"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ({"dflash_config.use_thresh_head_two_model": True}, "thresh_head_direct_len"),
        ({"dflash_config.use_prob_head": True}, "use_prob_head"),
    ],
)
def test_refuses_zlab_config(tmp_path, changes, key):
    drafter = make_drafter()
    config = zlab_config(drafter)
    for name, value in changes.items():
        place, _, inner = name.rpartition(".")
        (config[place] if place else config)[inner] = value
    with pytest.raises(AdaFlashValueError, match=key) as caught:
        AdaFlashDrafter.from_pretrained(write(tmp_path, config, zlab_tensors(drafter)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"mask_token_id": None}, "mask_token_id"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 2, 3]}, "aux_hidden_state_layer_ids"),
        ({"block_size": None}, "block_size"),
        ({"target_hidden_size": 64}, "target_hidden_size"),
        ({"draft_vocab_size": 5}, "d2t"),
        ({"projector_type": "dspark"}, "DSpark"),
    ],
)
def test_refuses_speculators_config(tmp_path, changes, key):
    drafter = make_drafter(num_target_layers=None)
    folder = write(tmp_path, speculators_config(drafter, **changes), speculators_tensors(drafter))
    with pytest.raises(AdaFlashValueError, match=key):
        AdaFlashDrafter.from_pretrained(folder)


@pytest.mark.parametrize(("name", "value"), [("d2t", VOCAB), ("t2d", False)])
def test_refuses_wrong_draft_vocabulary(tmp_path, name, value):
    drafter = make_drafter(draft_vocab_size=5, num_target_layers=None)
    tensors = speculators_tensors(drafter)
    tensors[name][-1 if name == "d2t" else 0] = value
    with pytest.raises(AdaFlashValueError, match=name):
        AdaFlashDrafter.from_pretrained(write(tmp_path, speculators_config(drafter), tensors))


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_refuses_assistant_without(tmp_path, key):
    config = MuseGlimmerAssistantConfig().to_dict()
    del config[key]
    with pytest.raises(AdaFlashValueError, match=key):
        AdaFlashDrafter.from_pretrained(write(tmp_path, config, {}))


def foreign_and_own(tmp_path, drafter, change):
    """The same damage done to a z-lab folder and to one of our own."""
    drafter.save_pretrained(tmp_path / "ours")
    zlab(tmp_path / "zlab", drafter)
    for folder in (tmp_path / "ours", tmp_path / "zlab"):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        yield folder


def test_refuses_wrong_tensors(tmp_path):
    def damage(tensors):
        del tensors["hidden_norm.weight"], tensors["layers.1.self_attn.q_norm.weight"]
        tensors["candidate_selector.weight"] = torch.zeros(2)
        tensors["norm.weight"] = torch.zeros(WIDTH + 1)

    for folder in foreign_and_own(tmp_path, make_drafter(), damage):
        with pytest.raises(AdaFlashValueError, match="missing.*unexpected.*mismatched") as caught:
            AdaFlashDrafter.from_pretrained(folder, output_loading_info=True)
        message = str(caught.value)
        assert "\n" not in message
        for name in ("hidden_norm.weight", "q_norm.weight", "candidate_selector.weight", "'norm.weight'"):
            assert name in message


def test_refuses_missing_tensors_by_their_own_name(tmp_path):
    drafter = make_drafter(length_head=HEAD)
    tensors = zlab_tensors(drafter)
    del tensors["thresh_head_two_model.res.0.bias"]
    with pytest.raises(AdaFlashValueError, match="missing.*thresh_head_two_model.res.0.bias"):
        AdaFlashDrafter.from_pretrained(write(tmp_path, zlab_config(drafter), tensors))


def test_refuses_unannounced_length_head(tmp_path):
    drafter = make_drafter(length_head=HEAD)
    config = zlab_config(drafter)
    del config["dflash_config"]["use_thresh_head_two_model"]
    with pytest.raises(AdaFlashValueError, match="unexpected.*thresh_head_two_model.down.weight"):
        AdaFlashDrafter.from_pretrained(write(tmp_path, config, zlab_tensors(drafter)))


def test_refuses_folders_that_are_not_drafters(tmp_path):
    with pytest.raises(AdaFlashValueError, match=r"config\.json"):
        AdaFlashDrafter.from_pretrained(tmp_path)
    with pytest.raises(AdaFlashValueError, match="LlamaForCausalLM"):
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        AdaFlashDrafter.from_pretrained(write(tmp_path, config, {}))
    zlab(tmp_path, make_drafter())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(AdaFlashValueError, match="model.safetensors"):
        AdaFlashDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("changes", [{"block_size": 1}, {"mask_token_id": VOCAB}, {"target_layer_ids": [0, 2, 9]}])
def test_refuses_wrong_overrides_of_our_own_layout(tmp_path, changes):
    make_drafter().save_pretrained(tmp_path)
    with pytest.raises(AdaFlashValueError, match=next(iter(changes))):
        AdaFlashDrafter.from_pretrained(tmp_path, **changes)
