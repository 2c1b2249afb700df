"""The fit, what it does to the head, and the report."""

import json

import pytest
import torch
from test_trainer import arguments, greedy_samples
from tiny import make_drafter, make_target

from adaflash_hf import AdaFlashDrafter, AdaFlashValueError
from adaflash_hf.evaluation.calibration import HeadExamples, calibrate, fit_calibration, head_examples
from adaflash_hf.training.data import collate
from adaflash_hf.training.distillation import DistillationModel
from adaflash_hf.training.length_head import attach_length_head
from adaflash_hf.training.trainer import AdaFlashTrainer


def examples_of(logits, truth):
    accepted = torch.bernoulli(truth.sigmoid())
    rows = torch.ones(len(logits), dtype=torch.bool)
    return HeadExamples("survival", logits, accepted, torch.ones_like(logits), accepted.cumprod(1).sum(1), rows, 4)


def test_the_fit_finds_the_temperature_and_bias_of_each_position():
    truth = torch.randn(20000, 3) * 1.5
    temperature, bias = torch.tensor([2.0, 1.0, 0.5]), torch.tensor([0.3, 0.0, -0.6])
    fitted = fit_calibration(examples_of((truth - bias) * temperature, truth))
    torch.testing.assert_close(fitted[0], temperature, rtol=0.1, atol=0.05)
    torch.testing.assert_close(fitted[1], bias, rtol=0, atol=0.08)


def test_positions_that_are_never_reached_stay_as_they_are():
    examples = examples_of(torch.randn(100, 3), torch.randn(100, 3))
    examples.weights[:, 2] = 0
    temperature, bias = fit_calibration(examples)
    assert temperature[2] == 1 and bias[2] == 0


@pytest.mark.parametrize("kind, positions", [("survival", 4), ("length", 1)])
def test_recalibrated_logits_survive_saving_and_a_second_calibration(kind, positions, tmp_path):
    drafter = make_drafter(head=kind)
    hidden = torch.randn(6, 5, 32)
    expected = drafter.length_head(hidden).detach()
    for _ in range(2):
        temperature, bias = torch.rand(positions) + 0.5, torch.randn(positions)
        expected = expected / temperature + bias
        drafter.length_head.recalibrate(temperature, bias)
    torch.testing.assert_close(drafter.length_head(hidden), expected, rtol=1e-4, atol=1e-5)
    drafter.save_pretrained(tmp_path)
    loaded = AdaFlashDrafter.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.length_head(hidden), expected, rtol=1e-4, atol=1e-5)
    copy = loaded.length_head.candidate_lengths(hidden)
    assert torch.equal(copy, drafter.length_head.candidate_lengths(hidden))


def test_checkpoints_from_before_calibration_load(tmp_path):
    drafter = make_drafter(head="survival")
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["length_head"].pop("calibrated", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AdaFlashDrafter.from_pretrained(tmp_path)
    hidden = torch.randn(2, 5, 32)
    assert torch.equal(loaded.length_head(hidden), drafter.length_head(hidden))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A drafter that knows some of the text, and its samples."""
    torch.manual_seed(0)
    target, drafter = make_target(), make_drafter(initializer_range=0.05)
    samples = greedy_samples(target, 24)
    folder = tmp_path_factory.mktemp("trained")
    AdaFlashTrainer(drafter, target, arguments(folder, max_steps=40), train_dataset=samples[:12]).train()
    return target, drafter, samples


@pytest.mark.parametrize("kind", ["survival", "length"])
@pytest.mark.parametrize("labels", ["greedy", "sampling"])
def test_a_head_trained_alone_and_calibrated_expects_what_happens(kind, labels, trained, tmp_path):
    target, drafter, samples = trained
    drafter.length_head = None
    attach_length_head(drafter, kind, bottleneck_size=16)
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    args = arguments(tmp_path, max_steps=20, length_head_only=True, length_head_labels=labels, learning_rate=1e-2)
    AdaFlashTrainer(drafter, target, args, train_dataset=samples).train()
    changed = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all(name.startswith("length_head.") for name in changed)
    # The head is spoiled, as a lasting shift of acceptance would do it.
    positions = 4 if kind == "survival" else 1
    drafter.length_head.recalibrate(torch.full((positions,), 0.5), torch.full((positions,), 2.5))

    model = DistillationModel(drafter, target, arguments(tmp_path, length_head_labels=labels, anchors_per_sequence=64))
    report = calibrate(model, [collate(samples[i : i + 8]) for i in range(0, 24, 8)])
    assert abs(report.expected[0] - report.realised) > 0.15
    assert report.expected[1] == pytest.approx(report.realised, abs=0.15)
    assert report.brier[1] < report.brier[0]
    assert sum(weight for *_, weight in report.reliability[1]) > 100
    report.plot(tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").stat().st_size > 5000
    assert report.table().count("\n") == 3


def test_realised_lengths_are_those_of_decoding(trained, tmp_path):
    """What the examples call accepted is what `generate` accepts at the same anchors."""
    target, drafter, samples = trained
    drafter.length_head = None
    attach_length_head(drafter, "survival", bottleneck_size=16)
    model = DistillationModel(drafter, target, arguments(tmp_path, anchors_per_sequence=64))
    sample = samples[0]
    found = head_examples(model, [collate([sample])])
    ids = sample["input_ids"]
    decoded = []
    drafter.generation_config.length_policy = "fixed"
    for anchor in range(4, len(ids) - 1):
        prompt = ids[None, :anchor]
        options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        out = target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, **options)
        # The prefill commits the anchor, so the first step is the block at it.
        decoded.append(out.statistics.accepted_lengths[0][0] - 1)
    ours = found.accepted[found.known].tolist()
    theirs = [length for length, known in zip(decoded, found.known.tolist(), strict=True) if known]
    assert ours == theirs and len(set(ours)) > 1


def test_a_drafter_without_head_is_refused(tmp_path):
    model = DistillationModel(make_drafter(), make_target(), arguments(tmp_path))
    with pytest.raises(AdaFlashValueError, match="length head"):
        head_examples(model, [])
    with pytest.raises(AdaFlashValueError, match="`length_head_only`"):
        DistillationModel(make_drafter(), make_target(), arguments(tmp_path, length_head_only=True))
    with pytest.raises(AdaFlashValueError, match="already"):
        attach_length_head(make_drafter(head="length"))
