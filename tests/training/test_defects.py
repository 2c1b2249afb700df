"""The 24 defects listed for AdaFlash's reference implementation: one test for each that can be tested.

Tested elsewhere: 1 clip per token (test_losses), 2 float32 divergences (test_losses), 8 calibration
(tests/evaluation/test_calibration), 12 optimizer of two processes (test_distributed), 15 immutable versions
(test_on_policy), 16 resume takes the saved weights (test_trainer, test_on_policy), 20 the head's length policy in
rollouts (below). Nothing to test: 4 (schedules are the Trainer's), 10 (there is no such branch), 24 (packaging).
"""

import pytest
import torch
from test_trainer import arguments, greedy_samples
from tiny import make_drafter, make_target

from adaflash_hf import AdaFlashValueError
from adaflash_hf.hub import replace_file
from adaflash_hf.training.anchors import sample_anchors
from adaflash_hf.training.data import collate
from adaflash_hf.training.distillation import DistillationModel
from adaflash_hf.training.exchange import Exchange
from adaflash_hf.training.length_head import HeadLabels
from adaflash_hf.training.losses import DistillationLoss
from adaflash_hf.training.rollout_worker import RolloutArguments, RolloutWorker, load_rollouts, save_rollouts
from adaflash_hf.training.rollouts import Sampling, complete
from adaflash_hf.training.stream import RolloutStream
from adaflash_hf.training.trainer import AdaFlashTrainer


def test_3_small_steps_reach_every_weight_and_norms_are_not_decayed(tmp_path):
    target, drafter = make_target(), make_drafter(head="survival")
    with pytest.raises(AdaFlashValueError, match="dtype=torch.float32"):
        DistillationModel(make_drafter().bfloat16(), target, arguments(tmp_path))
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    args = arguments(tmp_path, max_steps=1, learning_rate=5e-5, weight_decay=0.5)
    trainer = AdaFlashTrainer(drafter, target, args, train_dataset=greedy_samples(target, 4))
    trainer.train()
    assert all((p != before[name]).any() for name, p in drafter.named_parameters())
    names = {id(p): name for name, p in trainer.drafter.named_parameters()}
    decayed = {names[id(p)] for g in trainer.optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed and not any("norm" in name or name.endswith("bias") for name in decayed)


def labels_of(batch, tmp_path):
    """Anchors at every eligible position of a batch: blocks, and what the head is taught."""
    drafter = make_drafter(head="survival")
    model = DistillationModel(drafter, make_target(), arguments(tmp_path, anchors_per_sequence=64))
    with torch.no_grad():
        return model.blocks(**batch)


def test_5_head_labels_compare_with_the_teacher_not_with_the_text(tmp_path):
    """On sampled text, a draft that equals the text but not the teacher's argmax is no match."""
    blocks = labels_of(collate([{"input_ids": list(range(2, 22)), "prompt_length": 4}]), tmp_path)
    differ = (blocks.labels != blocks.actual) & blocks.supervised
    assert differ.any()
    result = DistillationLoss(torch.zeros(()), torch.zeros_like(differ), None)
    assert not HeadLabels.of(blocks, result).matches[differ].any()
    result.hits = torch.ones_like(differ)  # the drafter says what the teacher says
    labels = HeadLabels.of(blocks, result)
    assert labels.matches[differ].all() and not labels.going_on[differ].any()


def test_6_head_labels_end_with_the_response(tmp_path):
    long, short = list(range(2, 26)), list(range(2, 14))
    blocks = labels_of(collate([{"input_ids": ids, "prompt_length": 4} for ids in (long, short)]), tmp_path)
    result = DistillationLoss(torch.zeros(()), torch.ones_like(blocks.supervised), None)
    blocks.actual = blocks.labels
    labels = HeadLabels.of(blocks, result)
    assert not (labels.reached & ~blocks.supervised).any()
    accepted, known = labels.accepted()
    # Every draft hits: only blocks that lie inside the response whole have a known length.
    assert torch.equal(known, blocks.supervised.all(dim=1)) and 0 < known.sum() < len(known)
    assert (accepted[known] == 4).all()


def test_7_and_9_anchors_are_all_response_positions_with_a_next_one():
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, 4:12] = mask[1, 3:8] = mask[2, 9:11] = True  # up to the row's end, shorter, a single anchor
    anchors, used = sample_anchors(mask, 100)
    found = [row[keep].tolist() for row, keep in zip(anchors, used, strict=True)]
    assert found == [[4, 5, 6, 7, 8, 9, 10], [3, 4, 5, 6], [9]]


def test_11_logged_losses_are_means_whatever_the_interval(tmp_path):
    target = make_target()
    samples = greedy_samples(target, 8)

    def logged(folder, every):
        options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
        args = arguments(tmp_path / folder, max_steps=4, logging_steps=every, **options)
        trainer = AdaFlashTrainer(make_drafter(head="survival"), target, args, train_dataset=samples)
        trainer.train()
        return [entry["head_loss"] for entry in trainer.state.log_history if "head_loss" in entry]

    one, four = logged("one", 1), logged("four", 4)
    assert len(one) == 4 and len(four) == 1
    assert sum(one) / 4 == pytest.approx(four[0], abs=2e-4)


def shard(exchange, job):
    samples = [{"input_ids": [10 * job + i], "prompt_length": 0, "finish_reason": "stop", "accepted_lengths": []}
               for i in range(3)]  # fmt: skip
    save_rollouts(exchange, job, samples, 0, Sampling())


def test_13_every_process_reads_the_same_list_whenever_it_looks(tmp_path):
    exchange, read = Exchange(tmp_path), []
    shard(exchange, 0)
    early = iter(RolloutStream(exchange, samples_per_version=3, versions=3, leads=False))
    read.append([int(next(early)["input_ids"][0]) for _ in range(3)])
    shard(exchange, 2)  # a later job comes first
    shard(exchange, 1)
    read[0] += [int(next(early)["input_ids"][0]) for _ in range(6)]
    late = iter(RolloutStream(exchange, samples_per_version=3, versions=3))
    read.append([int(next(late)["input_ids"][0]) for _ in range(9)])
    assert read[0] == read[1] and sorted(read[0]) == [0, 1, 2, 10, 11, 12, 20, 21, 22]


def test_14_half_a_file_has_no_name_and_reading_deletes_nothing(tmp_path):
    def half(path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "00000000.safetensors", half)
    assert list(tmp_path.iterdir()) == []
    exchange = Exchange(tmp_path)
    shard(exchange, 0)
    stream = iter(RolloutStream(exchange, samples_per_version=3, versions=3))
    for _ in range(3):
        next(stream)
    assert exchange.rollout_path(0).exists()


def test_17_to_19_token_ids_are_kept_ends_are_the_models_and_sampling_samples(tmp_path):
    plain, prompt = make_target(), [3, 9, 4, 11]
    free = complete(plain, [prompt], 20)[0]["input_ids"]
    end = free[9]
    target = make_target(eos_token_id=None)
    target.generation_config.eos_token_id = [31, end]
    worker = RolloutWorker(
        target, None, [prompt], Exchange(tmp_path), RolloutArguments(1, 20, sampled_share=0.0, max_backlog=1)
    )
    worker.exchange.publish(0, make_drafter().save_pretrained)
    worker.make(0)
    sample = load_rollouts(worker.exchange, 0)[0][0]
    assert sample["input_ids"].tolist() == free[: free.index(end, 4) + 1]
    assert sample["finish_reason"] == "stop"
    assert Sampling(0.6).options() == {"do_sample": True, "temperature": 0.6, "top_p": 1.0, "top_k": 0}
    drawn = {tuple(row["input_ids"]) for row in complete(plain, [prompt] * 8, 20, Sampling(2.0))}
    assert len(drawn) > 4


def test_20_rollouts_verify_as_many_tokens_as_the_head_says(tmp_path, monkeypatch):
    from adaflash_hf.training import rollouts

    drafter, seen = make_drafter(head="survival"), []
    original = rollouts.collect_statistics

    def spy():
        context = original()

        class Spy:
            def __enter__(self):
                self.calls = context.__enter__()
                return self.calls

            def __exit__(self, *error):
                seen.extend(length for row in self.calls[0].candidate_lengths for length in row)
                return context.__exit__(*error)

        return Spy()

    monkeypatch.setattr(rollouts, "collect_statistics", spy)
    complete(make_target(), [[3, 4, 5]] * 3, 20, drafter=drafter)
    assert min(seen) < 5


def test_21_the_mask_token_comes_from_the_drafters_configuration():
    with pytest.raises(AdaFlashValueError, match="mask_token_id"):
        make_drafter(mask_token_id=None)


def test_22_rows_are_as_long_as_the_longest_and_the_target_runs_once(tmp_path):
    target = make_target()
    batch = collate([{"input_ids": list(range(2, n)), "prompt_length": 3} for n in (9, 16, 12)])
    assert batch["input_ids"].shape == (3, 14)
    calls = []
    target.register_forward_hook(lambda *args: calls.append(1))
    DistillationModel(make_drafter(head="length"), target, arguments(tmp_path))(**batch)
    assert len(calls) == 1


def test_23_the_target_is_neither_wrapped_nor_saved(tmp_path):
    target, drafter = make_target(), make_drafter()
    model = DistillationModel(drafter, target, arguments(tmp_path))
    assert {id(p) for p in model.parameters()} == {id(p) for p in drafter.parameters()}
    assert not any(p.requires_grad for p in target.parameters())
    assert all(name.startswith("drafter.") for name in model.state_dict())
