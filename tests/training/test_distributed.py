"""Two processes on a CPU train like one."""

import json
import os

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from processes import together
from test_trainer import arguments, greedy_samples
from tiny import make_drafter, make_target
from tiny_tokenizer import make_tokenizer, save_target

from adaflash_hf import AdaFlashDrafter, cli
from adaflash_hf.target import Target
from adaflash_hf.training import setup
from adaflash_hf.training.rollouts import build_feature_shards
from adaflash_hf.training.trainer import AdaFlashTrainer


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
STEPS = 4


def allow_fsdp_on_cpu():
    """accelerate takes up FSDP on accelerators only; on gloo it works the same."""
    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin}

    AcceleratorState.__init__ = init


def train(folder, samples, batch_size, resume=None):
    """Every eligible position is an anchor, so that nothing is drawn by chance."""
    if "ACCELERATE_USE_FSDP" in os.environ:
        allow_fsdp_on_cpu()
    options = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    target, drafter = make_target(), make_drafter(head="survival", draft_vocab_size=20)
    args = arguments(
        folder, per_device_train_batch_size=batch_size, anchors_per_sequence=64, acceptance_weight=0.5, **options
    )
    prompts = {"chat": [[3, 4, 5], [6, 7]], "code": [[8]] * 3}
    trainer = AdaFlashTrainer(
        drafter,
        target,
        args,
        train_dataset=samples,
        eval_dataset=samples[:4],
        evaluation_prompts=prompts,
        evaluation_tokens=12,
    )
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    if args.process_index == 0:
        (folder / "metrics.json").write_text(json.dumps(metrics))


def curve(folder, start=0):
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    entries = [entry for entry in state["log_history"] if "loss" in entry and entry["step"] > start]
    return [[entry[key] for entry in entries] for key in ("loss", "grad_norm", "tau", "head_loss")]


@pytest.fixture(scope="module")
def samples():
    """Of mixed lengths, so that processes hold different numbers of tokens."""
    rows = greedy_samples(make_target(), 16)
    return [{**row, "input_ids": row["input_ids"][: 12 + 2 * i]} for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def alone(samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    torch.manual_seed(0)
    train(folder, samples, 4)
    return folder


@pytest.fixture(scope="module", params=[{}, FSDP], ids=["DDP", "FSDP2"])
def pair(request, samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    together(2, train, folder, samples, 2, **request.param)
    return folder, request.param


def test_two_processes_equal_one(pair, alone):
    folder, environment = pair
    for ours, theirs in zip(curve(folder), curve(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    last = f"checkpoint-{STEPS}"
    assert (folder / last / "rng_state_1.pth").exists()
    assert any((folder / last).glob("pytorch_model_fsdp*")) == bool(environment)
    ours, theirs = AdaFlashDrafter.from_pretrained(folder / last), AdaFlashDrafter.from_pretrained(alone / last)
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-3, atol=1e-4)
    measured, expected = (json.loads((path / "metrics.json").read_text()) for path in (folder, alone))
    for key in ("eval_tau", "eval_tau_chat", "eval_accepted_code_1"):
        assert measured[key] == pytest.approx(expected[key], abs=0.1)


def test_two_processes_resume_as_they_would_have_gone_on(pair, samples, alone, tmp_path):
    folder, environment = pair
    together(2, train, tmp_path, samples, 2, str(folder / "checkpoint-2"), **environment)
    for ours, theirs in zip(curve(tmp_path, 2), curve(alone, 2), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


class KeepsDtypes(AdaFlashTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.seen = str(loss.dtype)
        return loss


def one_step(folder, samples, batch_size, bf16):
    if bf16:
        allow_fsdp_on_cpu()
    args = arguments(
        folder,
        per_device_train_batch_size=batch_size,
        anchors_per_sequence=64,
        max_steps=1,
        logging_steps=1,
        bf16=bf16,
    )
    trainer = KeepsDtypes(make_drafter(), make_target(), args, train_dataset=samples)
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    if bf16 and args.process_index == 0:
        policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
        found = [str(policy.param_dtype), str(policy.reduce_dtype), trainer.seen, loss]
        (folder / "found.json").write_text(json.dumps(found))
    return loss


def test_sharded_mixed_precision_sums_in_float32(samples, tmp_path):
    together(2, one_step, tmp_path, samples, 2, True, **FSDP)
    *dtypes, loss = json.loads((tmp_path / "found.json").read_text())
    assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert loss == pytest.approx(one_step(tmp_path, samples, 4, False), rel=0.02)


def whole_run(folder):
    setup.training_prompts = lambda domain, count: ["w1 w2", "w3 w4 w5", "w6"][:count]
    options = {
        "target": folder / "target",
        "output_dir": folder / "out",
        "prompts_per_domain": 3,
        "rollout_max_new_tokens": 8,
        "num_layers": 1,
        "num_taps": 1,
        "block_size": 4,
        "mask_token_id": 1,
        "draft_vocab_size": 16,
        "bottleneck_size": 8,
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "use_cpu": "true",
        "disable_tqdm": "true",
        "report_to": "none",
    }
    assert cli.main(["train", *(word for key, value in options.items() for word in (f"--{key}", str(value)))]) == 0


def test_a_whole_run_of_two_processes_calibrates_its_head(tmp_path):
    save_target(tmp_path / "target", make_target())
    together(2, whole_run, tmp_path)
    head = AdaFlashDrafter.from_pretrained(tmp_path / "out" / "drafter").length_head
    assert head.config.calibrated
    assert (tmp_path / "out" / "reliability.png").exists()


def make_features(folder, count):
    target = Target(make_target(), make_drafter().config)
    index = int(os.environ["RANK"])
    made = build_feature_shards(
        target, make_tokenizer(), [f"w{i}" for i in range(10)], folder, 6, 2, index=index, count=count
    )
    (folder / f"read-{index}").write_text(json.dumps([ids.tolist() for ids, _ in made.token_ids()]))


def test_processes_share_the_writing_of_features(tmp_path):
    (tmp_path / "two").mkdir()
    together(2, make_features, tmp_path / "two", 2)
    (tmp_path / "one").mkdir()
    together(1, make_features, tmp_path / "one", 1)
    read = [json.loads((tmp_path / name).read_text()) for name in ("two/read-0", "two/read-1", "one/read-0")]
    assert read[0] == read[1] == read[2] and len(read[0]) == 10
