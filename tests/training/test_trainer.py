"""What training shows the drafter is what decoding shows it, and nothing more."""

import json

import pytest
import torch
from tiny import make_drafter, make_target

from adaflash_hf import AdaFlashDrafter, AdaFlashError, AdaFlashValueError, collect_statistics
from adaflash_hf.kernels.packed_linear import pack_linear_weights
from adaflash_hf.target import Target
from adaflash_hf.training.anchors import BlockAttention
from adaflash_hf.training.arguments import AdaFlashTrainingArguments
from adaflash_hf.training.data import FeatureShards, collate, noisy, save_feature_shard
from adaflash_hf.training.distillation import DistillationModel
from adaflash_hf.training.length_head import HeadLabels, length_head_loss
from adaflash_hf.training.rollouts import add_features, frequent_tokens
from adaflash_hf.training.trainer import AdaFlashTrainer


def arguments(folder, **overrides):
    settings = {
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "anchors_per_sequence": 16,
        "max_steps": 100,
        "logging_steps": 25,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **overrides,
    }
    return AdaFlashTrainingArguments(output_dir=str(folder), **settings)


def greedy_samples(target, count: int, new_tokens: int = 40) -> list[dict]:
    prompts = torch.randint(2, 32, (count, 4), generator=torch.Generator().manual_seed(5))
    rows = target.generate(prompts, do_sample=False, max_new_tokens=new_tokens)
    return [{"input_ids": row, "prompt_length": 4} for row in rows]


@pytest.mark.parametrize("overrides", [{}, {"sliding_window": 8}, {"label_convention": "sample_from_anchor"}], ids=str)
def test_an_overfitted_drafter_accepts_nearly_everything(tmp_path, overrides):
    target = make_target()
    drafter = make_drafter(initializer_range=0.05, **overrides)
    samples = greedy_samples(target, 1)
    AdaFlashTrainer(drafter, target, arguments(tmp_path), train_dataset=samples * 64).train()
    drafter.eval()
    drafter.generation_config.length_policy = "fixed"
    with collect_statistics() as calls:
        ours = target.generate(
            samples[0]["input_ids"][None, :4], assistant_model=drafter, do_sample=False, max_new_tokens=40
        )
    assert torch.equal(ours[0], samples[0]["input_ids"])
    assert calls[0].mean_accepted_length > 0.85 * (drafter.config.num_drafted_tokens + 1)


@pytest.mark.parametrize(
    "overrides", [{}, {"sliding_window": 6}, {"sliding_window": 6, "sliding_window_causal": False}]
)
def test_training_and_decoding_draft_the_same(overrides):
    """The hidden states of a training block equal those of the decoding loop at the same anchor."""
    from adaflash_hf.generation.candidate_generator import DiffusionCandidateGenerator

    target, drafter = make_target(), make_drafter(**overrides)
    ids = greedy_samples(target, 1)[0]["input_ids"][None]
    sample = add_features(Target(target, drafter.config), [{"input_ids": ids[0], "prompt_length": 4}])[0]
    anchors, used = torch.tensor([[6, 11, 20]]), torch.ones(1, 3, dtype=torch.bool)
    noise = torch.full((1, 3, 5), drafter.config.mask_token_id)
    noise[..., 0] = ids.gather(1, anchors)
    slots = (anchors[..., None] + torch.arange(5)).reshape(1, -1)
    with torch.no_grad():
        trained = drafter(
            noise_embeds=target.get_input_embeddings()(noise.reshape(1, -1)),
            context_hidden_states=sample["features"][None],
            ragged=BlockAttention(anchors, used, ids.shape[1], drafter.config),
            position_ids=torch.cat([torch.arange(ids.shape[1])[None], slots], dim=1),
        ).last_hidden_state.reshape(3, 5, -1)
        for block, anchor in enumerate(anchors[0].tolist()):
            generator = DiffusionCandidateGenerator(drafter, Target(target, drafter.config))
            positions = torch.arange(anchor)
            generator.observe(sample["features"][:anchor], torch.zeros_like(positions), positions)
            decoded = generator._block_hidden(ids[0, anchor : anchor + 1], torch.tensor([anchor]), [0])
            torch.testing.assert_close(decoded[0], trained[block], rtol=1e-4, atol=1e-4)


def test_blocks_see_nothing_at_or_past_their_anchor():
    """Changing any token at or past an anchor changes nothing in that block but its anchor slot's input."""
    target, drafter = make_target(), make_drafter()
    parts = Target(target, drafter.config)
    ids = greedy_samples(target, 1)[0]["input_ids"]
    anchors, used = torch.tensor([[9, 12, 25]]), torch.ones(1, 3, dtype=torch.bool)

    def hidden(tokens, anchor_tokens):
        features = add_features(parts, [{"input_ids": tokens, "prompt_length": 4}])[0]["features"]
        noise = torch.full((1, 3, 5), drafter.config.mask_token_id)
        noise[0, :, 0] = anchor_tokens
        slots = (anchors[..., None] + torch.arange(5)).reshape(1, -1)
        with torch.no_grad():
            return drafter(
                noise_embeds=target.get_input_embeddings()(noise.reshape(1, -1)),
                context_hidden_states=features[None],
                ragged=BlockAttention(anchors, used, len(tokens), drafter.config),
                position_ids=torch.cat([torch.arange(len(tokens))[None], slots], dim=1),
            ).last_hidden_state.reshape(3, 5, -1)

    before = hidden(ids, ids[anchors[0]])
    for block, anchor in enumerate(anchors[0].tolist()):
        for position in range(anchor, len(ids)):
            changed = ids.clone()
            changed[position] = (changed[position] + 1) % 30 + 2
            torch.testing.assert_close(hidden(changed, ids[anchors[0]])[block], before[block], rtol=0, atol=1e-6)
        changed = ids.clone()
        changed[anchor - 1] = (changed[anchor - 1] + 1) % 30 + 2
        assert not torch.allclose(hidden(changed, ids[anchors[0]])[block], before[block], atol=1e-4)


def test_rows_without_anchors_give_a_finite_loss():
    target, drafter = make_target(), make_drafter(head="survival")
    model = DistillationModel(drafter, target, arguments("/tmp/unused"))
    batch = collate(
        [{"input_ids": list(range(2, 10)), "prompt_length": 8}, {"input_ids": [3] * 30, "prompt_length": 9}]
    )
    assert torch.isfinite(model(**batch)["loss"])
    nothing = collate([{"input_ids": [3, 4, 5], "prompt_length": 3}])
    assert model(**nothing)["loss"].item() == 0


def test_head_labels_ignore_blocks_whose_end_is_unknown():
    drafter = make_drafter(head="length")
    matches = torch.tensor([[True, True, False, False], [True, False, False, False]])
    reached = torch.tensor([[True, True, False, False], [True, True, False, False]])
    labels = HeadLabels(matches, matches, reached, reached)
    logits = drafter.length_head(torch.randn(2, 5, 32))
    total, count = length_head_loss(logits, labels, drafter.length_head.config)
    assert count == 1
    assert total.item() == pytest.approx(((logits[1].sigmoid() - 2 / 5) ** 2).item(), rel=1e-5)


def test_cached_features_train_like_live_ones(tmp_path):
    target = make_target()
    samples = greedy_samples(target, 8)
    parts = Target(target, make_drafter().config)
    save_feature_shard(tmp_path / "a.safetensors", add_features(parts, samples), parts.layer_ids, {})
    cached = FeatureShards(tmp_path, parts.layer_ids)
    losses = []
    for dataset in (samples, cached):
        model = DistillationModel(make_drafter(), target, arguments(tmp_path))
        torch.manual_seed(3)
        losses.append(model(**collate([dataset[i] for i in range(8)]))["loss"].item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert len(frequent_tokens(cached, 20, [0])) == 20 and 0 in frequent_tokens(cached, 20, [0])
    with pytest.raises(AdaFlashValueError, match="target_layer_ids"):
        FeatureShards(tmp_path, [0, 1])


def test_resume_equals_an_uninterrupted_run(tmp_path):
    target = make_target()
    samples = greedy_samples(target, 16)

    def train(folder, resume=None, **overrides):
        options = {"max_steps": 12, "logging_steps": 1, "save_strategy": "steps", "save_steps": 6, "seed": 4}
        trainer = AdaFlashTrainer(
            make_drafter(head="survival"), target, arguments(folder, **options, **overrides), train_dataset=samples
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train(tmp_path / "whole")
    resumed = train(tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-6"))
    for ours, theirs in zip(resumed.drafter.parameters(), whole.drafter.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    curves = []
    for folder in ("whole", "again"):
        state = json.loads((tmp_path / folder / "checkpoint-12" / "trainer_state.json").read_text())
        curves.append([entry["loss"] for entry in state["log_history"] if entry["step"] > 6])
    assert len(curves[0]) == 6 and curves[0] == pytest.approx(curves[1], rel=1e-4)
    saved = AdaFlashDrafter.from_pretrained(tmp_path / "whole" / "checkpoint-12")
    for ours, theirs in zip(saved.parameters(), whole.drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_non_finite_loss_stops_before_the_weights():
    target, drafter = make_target(), make_drafter()
    drafter.fc.weight.data[0, 0] = float("nan")
    before = drafter.layers[0].mlp.up_proj.weight.clone()
    trainer = AdaFlashTrainer(drafter, target, arguments("/tmp/unused"), train_dataset=greedy_samples(target, 4))
    with pytest.raises(AdaFlashError, match="learning_rate"):
        trainer.train()
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, before)


@pytest.mark.parametrize("key, value", [("divergence", "jsd"), ("alpha", 2.0), ("position_decay", 0.0), ("fp16", True),
                                        ("push_to_hub", True)])  # fmt: skip
def test_arguments_are_checked(key, value, tmp_path):
    with pytest.raises(AdaFlashValueError, match=f"`{key}`"):
        arguments(tmp_path, **{key: value})


def test_a_packed_target_still_trains():
    target, drafter = make_target(), make_drafter(draft_vocab_size=12)
    pack_linear_weights(target)
    model = DistillationModel(drafter, target, arguments("/tmp/unused"))
    model(**collate([{"input_ids": list(range(2, 22)), "prompt_length": 4}]))["loss"].backward()
    assert drafter.fc.weight.grad.abs().sum() > 0


def test_resume_follows_the_saved_draft_vocabulary(tmp_path):
    target, saved = make_target(), make_drafter(draft_vocab_size=12)
    saved.draft_token_ids.copy_(torch.arange(12) * 2)
    saved.save_pretrained(tmp_path)
    trainer = AdaFlashTrainer(make_drafter(draft_vocab_size=12), target, arguments(tmp_path), train_dataset=[])
    trainer._load_from_checkpoint(str(tmp_path))
    assert trainer.model.draft_index[2:6].tolist() == [1, -1, 2, -1]


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_non_finite_gradient_stops_before_the_weights(max_grad_norm, tmp_path):
    target, drafter = make_target(), make_drafter()
    drafter.norm.weight.register_hook(lambda grad: grad * float("inf"))
    before = drafter.fc.weight.clone()
    args = arguments(tmp_path, max_grad_norm=max_grad_norm)
    trainer = AdaFlashTrainer(drafter, target, args, train_dataset=greedy_samples(target, 4))
    with pytest.raises(AdaFlashError, match="gradient norm"):
        trainer.train()
    assert torch.equal(drafter.fc.weight, before)


def test_feature_noise_follows_each_features_spread_over_responses():
    features = torch.zeros(2, 500, 3)
    features[:, 100:, 1] = torch.randn(2, 400) * 10
    features[:, 0] = 1e6  # an outlier in the prompt
    loss_mask = (torch.arange(500) >= 100).expand(2, -1)
    noise = noisy(features, loss_mask, 0.05) - features
    assert noise[..., [0, 2]].abs().max() == 0
    assert noise[:, 1:, 1].std().item() == pytest.approx(0.5, rel=0.2)


def test_feature_noise_is_for_training_only(tmp_path):
    target, batch = make_target(), collate([{"input_ids": list(range(2, 22)), "prompt_length": 4}])
    losses = {}
    for amount in (0.0, 0.5):
        model = DistillationModel(make_drafter(), target, arguments(tmp_path, feature_noise=amount))
        losses[amount] = []
        for training in (True, False):
            torch.manual_seed(3)
            losses[amount].append(model.train(training)(**batch)["loss"].item())
    assert losses[0.5][1] == losses[0.0][1]
    assert losses[0.5][0] != losses[0.0][0]


def test_activation_checkpointing_changes_nothing(tmp_path):
    """The step runs twice through the layers and gives the same gradients."""
    target, grads = make_target(), []
    samples = greedy_samples(target, 4)
    for checkpointing in (False, True):
        args = arguments(tmp_path, max_steps=2, logging_steps=1, activation_checkpointing=checkpointing)
        trainer = AdaFlashTrainer(make_drafter(head="survival"), target, args, train_dataset=samples)
        trainer.train()
        assert trainer.drafter.layers[0].gradient_checkpointing == checkpointing
        grads.append([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
    assert grads[0] == pytest.approx(grads[1], rel=1e-4)


def test_a_stream_of_mixed_lengths(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for i in range(1000):
                yield {"input_ids": list(range(2, 10 + i % 13)), "prompt_length": 3}

    trainer = AdaFlashTrainer(make_drafter(), make_target(), arguments(tmp_path, max_steps=5), train_dataset=Stream())
    trainer.train()
    assert trainer.state.global_step == 5


def test_the_head_has_its_own_learning_rate(tmp_path):
    args = arguments(tmp_path, length_head_learning_rate=0.5, weight_decay=0.1)
    trainer = AdaFlashTrainer(make_drafter(head="survival"), make_target(), args, train_dataset=[])
    groups = trainer.create_optimizer().param_groups
    head = {id(p) for p in trainer.drafter.length_head.parameters()}
    rates = {(id(p) in head, group["lr"]) for group in groups for p in group["params"]}
    assert rates == {(True, 0.5), (False, 3e-3)}
    assert sum(len(group["params"]) for group in groups) == len(list(trainer.drafter.parameters()))


@pytest.mark.parametrize(
    "divergence, alpha, weight", [("reverse_kl", 0.0, 0.0), ("forward_kl", 0.5, 0.0), ("reverse_kl", 0.5, 2.0)]
)
def test_each_loss_lowers_itself(divergence, alpha, weight, tmp_path):
    target = make_target()
    args = arguments(tmp_path, max_steps=30, divergence=divergence, alpha=alpha, acceptance_weight=weight,
                     length_head_labels="sampling", logging_steps=10)  # fmt: skip
    drafter = make_drafter(head="survival", initializer_range=0.05)
    trainer = AdaFlashTrainer(drafter, target, args, train_dataset=greedy_samples(target, 4))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("convention", ["fill_in", "sample_from_anchor"])
@pytest.mark.parametrize("size", [2, 4])
def test_narrow_blocks_train_as_a_narrower_drafter_would(size, convention, tmp_path, monkeypatch):
    target, whole = make_target(), make_drafter(head="survival", label_convention=convention)
    narrow = make_drafter(head="survival", label_convention=convention, block_size=size)
    state = whole.state_dict()
    drafted = narrow.config.num_drafted_tokens
    state["length_head.position_bias"] = state["length_head.position_bias"][:drafted]
    narrow.load_state_dict(state)
    batch = collate(greedy_samples(target, 3))
    monkeypatch.setattr(torch, "randint", lambda low, high, shape: torch.tensor(size))
    results = []
    for drafter, options in ((whole, {"narrow_blocks": True}), (narrow, {})):
        model = DistillationModel(drafter, target, arguments(tmp_path, anchors_per_sequence=64, **options)).train()
        results.append(model(**batch))
        results[-1]["loss"].backward()
    ours, theirs = results
    assert len(ours["counts"]) == whole.config.num_drafted_tokens and ours["counts"][drafted:].sum() == 0
    for key in ("loss", "head_loss"):
        assert ours[key].item() == pytest.approx(theirs[key].item(), rel=1e-5)
    for key in ("hits", "counts"):
        assert torch.equal(ours[key][:drafted], theirs[key])
    torch.testing.assert_close(whole.fc.weight.grad, narrow.fc.weight.grad, rtol=1e-4, atol=1e-6)


def test_narrow_blocks_keep_the_slots_and_are_for_training_only(tmp_path):
    target, drafter = make_target(), make_drafter(head="survival")
    model = DistillationModel(drafter, target, arguments(tmp_path, anchors_per_sequence=4, narrow_blocks=True))
    batch = collate([{"input_ids": list(range(2, 30)), "prompt_length": 4}])
    shapes = {tuple(model.train().blocks(**batch).hidden.shape[:2]) for _ in range(40)}
    assert shapes == {(10, 2), (6, 3), (5, 4), (4, 5)}
    assert model.eval().blocks(**batch).hidden.shape[:2] == (4, 5)
    with pytest.raises(AdaFlashValueError, match="`narrow_blocks`"):
        DistillationModel(make_drafter(head="length"), target, model.settings)


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 3},
        {"max_steps": -1, "num_train_epochs": 1.5},
        # "Best" is the first checkpoint here, not the last.
        {"max_steps": 3, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1,
         "metric_for_best_model": "loss", "greater_is_better": True},
    ],
    ids=["steps", "epochs", "best"],
)  # fmt: skip
def test_a_finished_run_takes_no_further_step(tmp_path, options):
    samples, runs = greedy_samples(make_target(), 8), []
    options = {"save_strategy": "steps", "save_steps": 1, **options}
    for _ in range(3):
        trainer = AdaFlashTrainer(
            make_drafter(), make_target(), arguments(tmp_path, **options), train_dataset=samples, eval_dataset=samples
        )
        assert trainer.train(resume_from_checkpoint=True).global_step == 3
        runs.append(trainer.drafter.fc.weight.clone())
        trainer.evaluate()
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    if "load_best_model_at_end" in options:
        last = AdaFlashDrafter.from_pretrained(tmp_path / "checkpoint-3")
        assert not torch.equal(runs[0], last.fc.weight)
