"""On-policy training: what is published, what is read, and that kills and restarts change nothing."""

import json
import random
import signal
import time

import pytest
import torch
from processes import start
from test_trainer import arguments
from tiny import make_drafter, make_target
from transformers import TrainerCallback

from adaflash_hf import AdaFlashDrafter, AdaFlashError, AdaFlashValueError
from adaflash_hf.training.exchange import Exchange
from adaflash_hf.training.rollout_worker import RolloutArguments, RolloutWorker, load_rollouts, save_rollouts
from adaflash_hf.training.rollouts import Sampling
from adaflash_hf.training.stream import RolloutStream
from adaflash_hf.training.trainer import AdaFlashTrainer, last_checkpoint


PROMPTS = [[3 + i, 5, 7 + i] for i in range(7)]
STEPS = 12


def make_worker(folder, **overrides):
    settings = {"rollout_batch_size": 3, "rollout_max_new_tokens": 12, "sampled_share": 0.0, **overrides}
    return RolloutWorker(make_target(), None, PROMPTS, Exchange(folder / "exchange"), RolloutArguments(**settings))


def make_trainer(folder, worker=None, **overrides):
    options = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    # A worker that runs ahead of a killed trainer must not change the data here.
    options |= {"per_device_train_batch_size": 2, "steps_per_version": 3, "max_staleness": 100, "save_total_limit": 2}
    options |= overrides
    args = arguments(folder, mode="on_policy", **options)
    return AdaFlashTrainer(make_drafter(head="survival"), make_target(), args, rollout_worker=worker)


class Pause(TrainerCallback):
    """Keeps a trainer within two steps of a mark until `kill_at_random_points` has seen it and killed."""

    def on_step_end(self, *args, **kwargs):
        time.sleep(0.15)


def run_trainer(folder, in_process):
    trainer = make_trainer(folder, make_worker(folder) if in_process else None)
    trainer.add_callback(Pause())
    trainer.train(resume_from_checkpoint=True)


def run_worker(folder):
    make_worker(folder).run(poll_seconds=0.01)


def result(folder):
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    curve = [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]
    return curve, AdaFlashDrafter.from_pretrained(folder / f"checkpoint-{STEPS}").state_dict()


def assert_equal_results(ours, theirs):
    assert [step for step, _ in ours[0]] == list(range(1, STEPS + 1))
    assert [loss for _, loss in ours[0]] == pytest.approx([loss for _, loss in theirs[0]], rel=1e-4)
    for key, value in theirs[1].items():
        torch.testing.assert_close(ours[1][key], value, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_trainer(folder, True)
    return folder


def test_no_rollouts_are_made_for_a_version_that_does_not_come(undisturbed):
    jobs = sorted(int(path.stem) for path in (undisturbed / "exchange" / "rollouts").iterdir())
    assert jobs == list(range(STEPS * 2 // 3))  # 12 steps of 2 samples, 3 samples a job


def test_a_repeated_command_changes_nothing_and_tells_workers(undisturbed):
    before, exchange = result(undisturbed), Exchange(undisturbed / "exchange")
    exchange.set_finished(False)  # as if the run had been killed before it said so
    trainer = make_trainer(undisturbed, make_worker(undisturbed))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS and exchange.finished
    assert not (undisturbed / f"checkpoint-{STEPS + 1}").exists()
    for key, value in before[1].items():
        assert torch.equal(trainer.drafter.state_dict()[key], value)


def test_versions_and_rollouts(undisturbed):
    exchange = Exchange(undisturbed / "exchange")
    assert exchange.finished and exchange.current_version() == STEPS // 3
    assert len(list(exchange.versions.iterdir())) == exchange.keep_versions
    last = AdaFlashDrafter.from_pretrained(exchange.version_path(4))
    for key, value in result(undisturbed)[1].items():
        assert torch.equal(last.state_dict()[key], value)

    target, made_by = make_target(), []
    for job in range(STEPS * 2 // 3):
        samples, version = load_rollouts(exchange, job)
        made_by.append(version)
        for sample in samples:
            ids = sample["input_ids"].long()
            plain = target.generate(ids[None, : sample["prompt_length"]], do_sample=False, max_new_tokens=12)
            assert torch.equal(ids, plain[0])
            assert sample["finish_reason"] == "length"
            # The prefill commits the first token.
            assert sum(sample["accepted_lengths"]) == len(ids) - sample["prompt_length"] - 1
    assert made_by == sorted(made_by) and made_by[-1] >= 2


def test_all_prompts_once_per_epoch(tmp_path):
    worker = make_worker(tmp_path, sampled_share=0.5)
    drawn = [worker.recipe_of(job) for job in range(70)]
    order = [index for _, indices in drawn for index in indices]
    epochs = [order[start : start + 7] for start in range(0, 210, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and epochs[0] != epochs[1]
    assert 20 < sum(sampling.temperature > 0 for sampling, _ in drawn) < 50
    assert drawn == [worker.recipe_of(job) for job in range(70)]


def test_sampled_rollouts_leave_the_random_state_alone(tmp_path):
    worker = make_worker(tmp_path, sampled_share=1.0)
    worker.exchange.publish(0, make_drafter().save_pretrained)
    before = torch.random.get_rng_state()
    worker.make(0)
    assert torch.equal(torch.random.get_rng_state(), before)
    first = [sample["input_ids"].tolist() for sample in load_rollouts(worker.exchange, 0)[0]]
    worker.make(0)
    assert first == [sample["input_ids"].tolist() for sample in load_rollouts(worker.exchange, 0)[0]]


def test_hot_reload_between_jobs(tmp_path):
    worker = make_worker(tmp_path)
    for version in (0, 1):
        worker.exchange.publish(version, make_drafter(seed=version).save_pretrained)
        worker.make(version)
        assert torch.equal(worker.drafter.fc.weight, make_drafter(seed=version).fc.weight)
        assert load_rollouts(worker.exchange, version)[1] == version


def fill(exchange, job, version, first):
    samples = [
        {"input_ids": [first + i], "prompt_length": 0, "finish_reason": "stop", "accepted_lengths": []}
        for i in range(2)
    ]
    save_rollouts(exchange, job, samples, version, Sampling())


def test_the_stream_passes_over_stale_jobs_and_repeats_nothing_else(tmp_path):
    exchange = Exchange(tmp_path)
    for job, version in enumerate([0, 0, 0, 2, 0]):
        fill(exchange, job, version, 10 * job)
    stream = RolloutStream(exchange, samples_per_version=2, versions=3, max_staleness=1)
    drawn = [int(sample["input_ids"][0]) for sample in stream]  # ends, and asks for no fifth job
    assert [sorted(drawn[i : i + 2]) for i in (0, 2, 4)] == [[0, 1], [10, 11], [30, 31]]
    assert stream.stale_jobs == 1 and exchange.needed_job() == 3
    passes = RolloutStream(exchange, samples_per_version=8, versions=1, passes=4)
    drawn = [int(sample["input_ids"][0]) for sample in passes]
    assert sorted(drawn) == [0] * 4 + [1] * 4
    with pytest.raises(AdaFlashValueError, match="rollout_passes"):
        RolloutStream(exchange, samples_per_version=8, versions=1, passes=3)


def test_a_worker_waits_at_its_backlog(tmp_path):
    worker = make_worker(tmp_path, max_backlog=2)
    worker.exchange.publish(0, make_drafter().save_pretrained)
    process = start(run_worker_with_backlog, tmp_path)
    try:
        wait_for(lambda: worker.exchange.rollout_path(1).exists())
        time.sleep(0.5)
        assert not worker.exchange.rollout_path(2).exists()
        worker.exchange.need_job(1)
        wait_for(lambda: worker.exchange.rollout_path(2).exists())
        worker.exchange.set_finished(True)
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()


def run_worker_with_backlog(folder):
    make_worker(folder, max_backlog=2).run(poll_seconds=0.01)


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_at_random_points(folder, processes, kills, seed):
    """Kills and starts again, a random while after each mark of progress.

    Args:
        processes: name -> function that starts the process.
        kills: (name, path under `folder`) pairs: the process dies soon after the path has come to exist.
    """
    rng = random.Random(seed)
    running = {name: begin() for name, begin in processes.items()}
    for name, mark in kills:
        wait_for((folder / mark).exists, 60)
        time.sleep(rng.uniform(0, 0.4))
        running[name].kill()
        running[name].join()
        assert running[name].exitcode == -signal.SIGKILL
        running[name] = processes[name]()
    for process in running.values():
        process.join(120)
        assert process.exitcode == 0


def test_killed_at_random_points_in_process(undisturbed, tmp_path):
    kills = [("trainer", mark) for mark in ("exchange/rollouts/00000001.safetensors", "checkpoint-4", "checkpoint-6")]
    kill_at_random_points(tmp_path, {"trainer": lambda: start(run_trainer, tmp_path, True)}, kills, seed=1)
    assert_equal_results(result(tmp_path), result(undisturbed))


def test_killed_at_random_points_side_by_side(undisturbed, tmp_path):
    processes = {
        "trainer": lambda: start(run_trainer, tmp_path, False),
        "worker": lambda: start(run_worker, tmp_path),
    }
    kills = [
        ("worker", "exchange/rollouts/00000001.safetensors"),
        ("trainer", "checkpoint-2"),
        ("trainer", "exchange/versions/00000002"),
        ("worker", "checkpoint-6"),
    ]
    kill_at_random_points(tmp_path, processes, kills, seed=2)
    assert_equal_results(result(tmp_path), result(undisturbed))


def test_an_interrupted_checkpoint_is_passed_over(tmp_path):
    for step, text in ((2, "{}"), (10, "{}"), (12, '{"half'), (14, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if text is not None:
            (folder / "trainer_state.json").write_text(text)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert last_checkpoint(tmp_path / "none") is None


def test_an_interrupted_version_is_never_seen(tmp_path):
    exchange = Exchange(tmp_path)
    exchange.publish(0, make_drafter().save_pretrained)

    def fail(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exchange.publish(1, fail)
    assert exchange.current_version() == 0 and not exchange.version_path(1).exists()
    exchange.publish(1, make_drafter(seed=2).save_pretrained)
    assert [path.name for path in exchange.versions.iterdir() if path.name.startswith(".")] == []


def test_what_does_not_fit_is_refused(tmp_path):
    make_worker(tmp_path)
    with pytest.raises(AdaFlashValueError, match="`rollout_max_new_tokens` of the rollouts is 13"):
        make_worker(tmp_path, rollout_max_new_tokens=13)
    with pytest.raises(AdaFlashValueError, match="`max_steps`"):
        arguments(tmp_path, mode="on_policy", max_steps=-1)
    with pytest.raises(AdaFlashValueError, match="`train_dataset`"):
        AdaFlashTrainer(make_drafter(), make_target(), arguments(tmp_path, mode="on_policy"), train_dataset=[1])
    with pytest.raises(AdaFlashValueError, match="`rollout_worker`"):
        AdaFlashTrainer(make_drafter(), make_target(), arguments(tmp_path), rollout_worker=make_worker(tmp_path))
    with pytest.raises(AdaFlashValueError, match="`exchange`"):
        make_trainer(tmp_path, make_worker(tmp_path), exchange=str(tmp_path / "other"))
    for key, value in (("sampled_share", 2), ("temperature", 0), ("chat_template_kwargs", "[1]"), ("max_backlog", 0)):
        with pytest.raises(AdaFlashError, match=f"`{key}`"):
            RolloutArguments(**{key: value})
