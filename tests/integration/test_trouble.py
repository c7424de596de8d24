"""What goes wrong in a long run ends in one clear line, with the last complete checkpoint to go on from."""

import contextlib
import io
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from rich.console import Console

from memoryathena import AthenaError
from memoryathena.memory.policies import Fixed, Policy
from memoryathena.training import trouble
from memoryathena.training.checkpoint import checkpoints, load_checkpoint, newest_checkpoint
from memoryathena.training.learner import Learner
from memoryathena.training.loop import train_stage
from memoryathena.training.passes import run
from memoryathena.training.recompute import recomputed
from memoryathena.training.stages import make_stage
from memoryathena.training.tracking import EVENTS, read_events
from memoryathena.training.trouble import Interrupts
from tests.training import fresh, learn, options, rows, same, state

NO_CHECKPOINT = "the last complete checkpoint is none"


def goes_on(folder: Path, step: int) -> str:
    return f"the last complete checkpoint is {folder / f'checkpoint-{step}'}, to go on from with --resume"


# -- what is not a number ----------------------------------------------------------------------------------------------


def test_a_loss_that_explodes_updates_nothing_and_says_where_to_go_on(tmp_path: Path) -> None:
    model = fresh()
    with pytest.raises(AthenaError) as met:
        train_stage(model, "pathways", options({"learning_rate": 1e30}, save_steps=1), rows(), None, tmp_path)
    message = str(met.value)
    assert message.startswith("stage pathways: the loss is nan at step 1; lower the learning rate")
    assert message.endswith(goes_on(tmp_path, 1))
    saved, _, _ = load_checkpoint(tmp_path / "checkpoint-1")
    for name in make_stage("pathways", options().pathways).trained(model):
        assert torch.equal(model.memory.get_parameter(name), saved[f"parameter/{name}"])
    assert all(parameter.grad is None for parameter in model.memory.parameters())


@pytest.mark.parametrize("stage", ["memory", "router"])
def test_a_gradient_that_is_not_a_number_stops_before_the_update(stage: str) -> None:
    model = fresh()
    before = state(model)
    name = {"memory": "table.weight", "router": "sites.1.advantage.down.weight"}[stage]
    model.memory.get_parameter(name).register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(AthenaError, match=rf"stage {stage}: the (table's )?gradient's norm is nan at step 0"):
        train_stage(model, stage, options(), rows())
    assert same(state(model), before)


def test_a_held_out_score_that_is_not_a_number_is_never_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([float("nan"), 3.0, float("nan"), 2.5])
    monkeypatch.setattr("memoryathena.training.loop.evaluate", lambda *_: {"E": next(scores)})
    _, out = learn("memory", options(eval_steps=2))
    assert out["best_step"] == 8


# -- memory that runs out ----------------------------------------------------------------------------------------------


def too_much(*_: Any, **__: Any) -> None:
    """The allocator's own error, whatever this system calls it."""
    torch.empty(2**50)


def of_a_gpu(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")


@pytest.mark.parametrize("fails", [too_much, of_a_gpu])
def test_out_of_memory_says_what_to_lower(
    fails: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = options({"per_device_train_batch_size": 4}, save_steps=3)
    whole, _ = learn("memory", config)
    plain = Learner.step

    def step(learner: Learner, batches: Any, number: int, *rest: Any) -> Any:
        return plain(learner, batches, number, *rest) if number < 5 else fails()

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", step)
        with pytest.raises(AthenaError) as met:
            learn("memory", config, tmp_path)
    assert str(met.value) == (
        "stage memory: out of memory: lower memory.per_device_train_batch_size from 4 to 2 and raise "
        "memory.gradient_accumulation_steps from 1 to 2 (the result is the same), or set gradient_checkpointing=true; "
        + goes_on(tmp_path, 3)
    )
    advised = options({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, gradient_checkpointing=True)
    resumed, _ = learn("memory", advised, tmp_path, resume=True)
    for name, value in state(whole).items():
        torch.testing.assert_close(resumed.memory.get_parameter(name), value, rtol=1e-3, atol=1e-3)


def test_out_of_memory_while_validating_gives_other_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memoryathena.training.loop.evaluate", of_a_gpu)
    with pytest.raises(AthenaError) as met:
        learn("router", options(eval_steps=2))
    assert str(met.value) == (
        f"stage router, validating: out of memory: lower per_device_eval_batch_size from 4 to 2; {NO_CHECKPOINT}"
    )


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Learner, "step", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        learn("memory", options())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gpt_neox"])
def test_recomputation_gives_the_same_bits(name: str) -> None:
    """The batched pass of three endpoints, its gradients, and the sites' decisions: injected once, not twice."""
    model = fresh(name)
    policies: dict[str, Policy | None] = {use: Fixed(use) for use in ("E", "GE", "GH")}
    parameters = [p for key, p in model.memory.named_parameters() if "advantage" not in key]
    results, kept, decided = [], [], []
    for enabled in (False, True):
        sizes: list[int] = []
        with recomputed(model, enabled), torch.autograd.graph.saved_tensors_hooks(counting(sizes), lambda x: x):
            found, decisions = run(model, policies, rows().batch(0, 2))
            losses = sum(log_p.sum() for log_p in found.values())
            results.append((losses, *torch.autograd.grad(losses, parameters, allow_unused=True)))
        kept.append(sum(sizes))
        decided.append(len(decisions))
    for plain, again in zip(*results, strict=True):
        assert (plain is None) == (again is None)
        assert plain is None or torch.equal(plain, again)
    assert kept[1] < 0.85 * kept[0]
    assert decided == [6, 6]
    assert not any("forward" in block.__dict__ for block in model._injection.blocks)


def counting(sizes: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    return pack


@pytest.mark.parametrize("stage", ["memory", "pathways", "router"])
def test_recomputed_stages_are_the_same(stage: str) -> None:
    plain, again = (learn(stage, options(gradient_checkpointing=flag))[0] for flag in (False, True))
    assert same(state(plain), state(again))


# -- a disk that is full -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system itself refuses to write more, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_last_checkpoint_and_resumes(tmp_path: Path) -> None:
    config = options(save_steps=2, logging_steps=4)
    whole, _ = learn("memory", config)
    learn("memory", config, tmp_path)
    events = (tmp_path / EVENTS).read_bytes()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    for path in checkpoints(tmp_path)[1:]:  # as if it had come no further
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    with files_of_at_most(5_000), pytest.raises(AthenaError) as met:
        learn("memory", config, tmp_path, resume=True)
    assert str(met.value).startswith(f"cannot write {tmp_path / 'checkpoint-6'}: ")
    assert str(met.value).endswith(goes_on(tmp_path, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", EVENTS]
    with files_of_at_most(10), pytest.raises(AthenaError, match=rf"cannot write .*{EVENTS}: File too large"):
        learn("memory", config, tmp_path, resume=True)
    resumed, _ = learn("memory", config, tmp_path, resume=True)
    assert same(state(resumed), state(whole))
    assert (tmp_path / EVENTS).read_bytes() == events


# -- somebody who wants it to stop -------------------------------------------------------------------------------------


def test_a_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with Interrupts(enabled=True) as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same press, as torchrun passes it on
        assert interrupts.caught == signal.SIGINT
        interrupts.caught = 0
    monkeypatch.setattr(trouble, "ONE_PRESS_S", 0.0)
    with Interrupts(enabled=True) as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.caught = 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_after_the_last_step_still_holds() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts(enabled=True):
        signal.raise_signal(signal.SIGINT)


# -- where a run tells how it goes -------------------------------------------------------------------------------------


def test_events_and_the_bar_tell_the_same(tmp_path: Path) -> None:
    text = io.StringIO()
    config = options(logging_steps=3, eval_steps=4)
    learn("router", config, tmp_path, console=Console(file=text, force_terminal=True, width=150))
    events = read_events(tmp_path / EVENTS)
    assert [event["step"] for event in events] == [3, 4, 6, 8]
    assert [event["tokens"] for event in events] == [step * 2 * 24 for step in (3, 4, 6, 8)]
    assert set(events[1]) == {"stage", "step", "tokens", "loss", "grad_norm", "learning_rate", "valid"}
    last = [line for line in text.getvalue().splitlines() if "stage router" in line][-1]
    assert "8/8" in last
    assert "tokens/s" in last
    assert "0:00:00" in last


def test_the_last_event_may_be_cut(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [event["step"] for event in read_events(tmp_path / EVENTS)] == [1, 2]
    assert read_events(tmp_path / "nothing") == []


class Recorder:
    """A tracker that writes down what it is told."""

    def __init__(self, name: str, **_: Any):
        self.told: list[Any] = [name]
        recorders.append(self)

    def start(self) -> None:
        self.told.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values["max_length"])

    def log(self, values: dict[str, Any], step: int) -> None:
        self.told.append((step, values))

    def finish(self) -> None:
        self.told.append("finish")


recorders: list[Recorder] = []


def test_trackers_are_told_what_the_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    recorders.clear()
    learn("memory", options(report_to="wandb", run_name="mine", eval_steps=4), tmp_path)
    (recorder,) = recorders
    assert recorder.told[:3] == ["mine", "start", 24]
    assert recorder.told[-1] == "finish"
    events = read_events(tmp_path / EVENTS)
    assert [step for step, _ in recorder.told[3:-1]] == [event["step"] for event in events]
    step, values = recorder.told[6]
    assert step == 4
    assert values == {
        "memory/tokens": 4 * 2 * 24,
        "memory/loss": events[3]["loss"],
        "memory/grad_norm": events[3]["grad_norm"],
        "memory/learning_rate": events[3]["learning_rate"],
        "memory/valid/E": events[3]["valid"]["E"],
    }


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch.utils.tensorboard", "tensorboardX", "tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(AthenaError, match=r"report_to names tensorboard, which is not installed here .*pip"):
        learn("memory", options(report_to="tensorboard"), tmp_path)


def test_tensorboard_gets_a_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an optional tracker: pip install tensorboard")
    learn("memory", options(report_to="tensorboard", run_name="mine"), tmp_path)
    assert list(tmp_path.glob("mine-memory/events.out.tfevents*"))
    assert json.loads((tmp_path / EVENTS).read_text().splitlines()[0])["step"] == 1
