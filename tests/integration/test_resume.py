"""Law 7: a stage that is killed twice and resumed is the stage that nobody interrupted, bit for bit."""

import functools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from memoryathena import AthenaError, AthenaModel
from memoryathena.training.checkpoint import BEST, STATE, checkpoints, load_checkpoint, newest_checkpoint
from memoryathena.training.config import STAGES, TrainingConfig
from memoryathena.training.loop import train_stage
from memoryathena.training.stages import make_stage
from memoryathena.training.tracking import EVENTS, read_events
from memoryathena.training.trouble import Stopped
from tests.training import bare, fresh, held_out, learn, options, rows, same, state

STEPS = 20
DONE = "done.safetensors"

# Processes with another hash seed than this one, forked from one that has done the imports, which take seconds.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])


def long() -> TrainingConfig:
    """Enough steps to be killed in, with everything that must be remembered: a schedule, parts, a best so far,
    losses that wait for the next event."""
    stage = {"max_steps": STEPS, "warmup_steps": 5, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    return options(stage, logging_steps=2, save_steps=3, eval_steps=4, eval_tokens=96)


@functools.cache
def whole(stage: str) -> tuple[AthenaModel, bytes]:
    """The run that nobody interrupts, in this process: the model and events.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        model, _ = learn(stage, long(), Path(folder))
        return model, (Path(folder) / EVENTS).read_bytes()


def child(stage: str, folder: Path) -> None:
    """What `athena train --resume` does, in a process that can be killed."""
    torch.set_num_threads(1)
    model = fresh()
    before = bare(model)
    try:
        train_stage(model, stage, long(), rows(), held_out(), folder, resume=True)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
    assert same(bare(model), before)
    save_file(state(model), folder / DONE)


def start(stage: str, folder: Path) -> BaseProcess:
    process = context.Process(target=child, args=(stage, folder))
    process.start()
    return process


def wait_for(process: BaseProcess, folder: Path, step: int) -> None:
    """Until that step is logged."""
    until = time.monotonic() + 60
    while not any(event["step"] >= step for event in read_events(folder / EVENTS)):
        assert process.is_alive(), f"ended before step {step}"
        assert time.monotonic() < until
        time.sleep(0.001)


def finish(process: BaseProcess) -> int | None:
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize("stage", STAGES)
def test_killed_twice_is_never_killed(stage: str, tmp_path: Path) -> None:
    draw, reached = random.Random(stage), 0
    for _ in range(2):
        reached += draw.randint(2, STEPS // 3)
        process = start(stage, tmp_path)
        wait_for(process, tmp_path, reached)
        time.sleep(draw.uniform(0, 0.02))  # anywhere within a step, or a checkpoint
        process.kill()
        assert finish(process) == -signal.SIGKILL
    assert newest_checkpoint(tmp_path) is not None
    assert finish(start(stage, tmp_path)) == 0
    model, events = whole(stage)
    assert same(load_file(tmp_path / DONE), state(model))
    assert (tmp_path / EVENTS).read_bytes() == events
    trained = make_stage(stage, long().stage(stage)).trained(model)
    fixed, after = ({k: v for k, v in state(m).items() if k not in trained} for m in (fresh(), model))
    assert same(fixed, after)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_where_it_is(number: int, code: int, tmp_path: Path) -> None:
    process = start("pathways", tmp_path)
    wait_for(process, tmp_path, 2)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert finish(process) == code
    last = read_events(tmp_path / EVENTS)[-1]["step"]
    assert newest_checkpoint(tmp_path) in [tmp_path / f"checkpoint-{step}" for step in (last, last + 1)]
    assert finish(start("pathways", tmp_path)) == 0
    assert same(load_file(tmp_path / DONE), state(whole("pathways")[0]))


def test_the_best_on_held_out_text_is_kept(tmp_path: Path) -> None:
    """A rate far too high: held-out text gets worse, the run stops early and gives back what was best."""
    wild = options({"max_steps": 30, "learning_rate": 0.3}, eval_steps=2, early_stopping_patience=2, save_steps=1)
    model, out = learn("pathways", wild, tmp_path)
    scores = {event["step"]: sum(event["valid"].values()) / 3 for event in out["history"] if "valid" in event}
    assert out["best_step"] == min(scores, key=lambda step: scores[step])
    assert out["steps"] == max(scores) == out["best_step"] + 4 < 30
    # Without an early stop or a best, the checkpoint of that step has the parameters of that step.
    every = wild.override(early_stopping_patience=None, load_best_model_at_end=False, save_total_limit=30)
    last, _ = learn("pathways", every, tmp_path / "every")
    tensors, _, _ = load_checkpoint(tmp_path / "every" / f"checkpoint-{out['best_step']}")
    for name in make_stage("pathways", wild.pathways).trained(model):
        assert torch.equal(model.memory.get_parameter(name), tensors[f"parameter/{name}"])
    assert not same(state(last), state(model))
    # Resuming what has stopped by itself gives the same again.
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert (newest / BEST).is_file()
    assert same(state(learn("pathways", wild, tmp_path, resume=True)[0]), state(model))


def test_other_parts_go_on_where_the_large_batch_stopped(tmp_path: Path) -> None:
    """After running out of memory one goes on with smaller parts; with another rate, or other text, one does not."""
    one = options({"per_device_train_batch_size": 4}, save_steps=4)
    learn("memory", one, tmp_path)
    smaller = options({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, gradient_checkpointing=True)
    _, out = learn("memory", smaller, tmp_path, resume=True)
    assert [event["step"] for event in out["history"]] == list(range(1, 9))
    with pytest.raises(AthenaError, match=r"checkpoint-4 was made with memory.learning_rate 0.003, this run has 0.1"):
        learn("memory", options({"per_device_train_batch_size": 4, "learning_rate": 0.1}), tmp_path, resume=True)
    with pytest.raises(AthenaError, match=r"was made with text digest \w+, this run has"):
        train_stage(fresh(), "memory", one, rows(7), held_out(), tmp_path, resume=True)
    with pytest.raises(AthenaError, match=r"was made with frozen \w+, this run has"):
        learn("pathways", one, tmp_path, resume=True)
    changed = fresh()
    with torch.no_grad():
        changed.memory.sites["1"].advantage.down.weight.add_(1)
    with pytest.raises(AthenaError, match=r"was made with frozen \w+, this run has"):
        train_stage(changed, "memory", one, rows(), held_out(), tmp_path, resume=True)


def test_without_resume_a_run_begins_anew(tmp_path: Path) -> None:
    first, _ = learn("memory", options(save_steps=3), tmp_path)
    second, _ = learn("memory", options(save_steps=4), tmp_path)
    assert same(state(first), state(second))
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-4"]  # not 6
    assert len(read_events(tmp_path / EVENTS)) == 8


def test_a_bfloat16_backbone_beside_a_float32_memory(tmp_path: Path) -> None:
    """Interrupted and resumed in mixed precision too; everything that learns stays float32."""
    whole = fresh(dtype=torch.bfloat16)
    train_stage(whole, "pathways", options(save_steps=5), rows(), held_out(), tmp_path)
    assert {value.dtype for value in state(whole).values()} == {torch.float32}
    assert {value.dtype for value in bare(whole).values()} == {torch.bfloat16}
    resumed = fresh(dtype=torch.bfloat16)
    train_stage(resumed, "pathways", options(save_steps=5), rows(), held_out(), tmp_path, resume=True)
    assert same(state(resumed), state(whole))
    assert {value.dtype for value in load_file(tmp_path / "checkpoint-5" / STATE).values()} == {
        torch.float32,
        torch.uint8,
    }
