"""Two gloo processes under torchrun are one process: the same losses and parameters; the table's state in shares.

Everything is in float64, where summing in another order leaves differences that no optimiser can blow up.
"""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from memoryathena import AthenaModel
from memoryathena.training.config import STAGES, TrainingConfig
from memoryathena.training.data import Windows
from memoryathena.training.distributed import World, shard_backbone
from memoryathena.training.learner import Learner
from memoryathena.training.loop import train_stage
from memoryathena.training.stages import make_stage
from memoryathena.training.trouble import Stopped
from tests.training import attached, fresh, held_out, options, rows, same, state

PROCESSES = 2
STOP = 3
"""After this step a process is told to stop."""
ROOT = Path(__file__).parents[2]


def split(processes: int, **fields: Any) -> TrainingConfig:
    """Eight rows per step however many share them."""
    stage = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // processes, "max_steps": 6}
    stage |= {"table_surprise": 0.5, "table_settling": 0.3, "table_weight_decay": 0.01}
    return options(stage, eval_steps=2, eval_tokens=96, **fields)


@dataclasses.dataclass
class Stopping:
    """A text whose reader is sent SIGTERM at its nth row."""

    source: Windows
    left: int

    def windows(self, length: int) -> int:
        return self.source.windows(length)

    def window(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.source.window(index, length)


def learned(stage: str, config: TrainingConfig, folder: Path | None = None, **more: Any) -> tuple[AthenaModel, dict]:
    model = fresh()
    return model, train_stage(model, stage, config, rows(), held_out(), folder, **more)


# -- what each of the two processes does -------------------------------------------------------------------------------


def process(out: Path) -> None:
    """All stages in all ways; what came of it goes to `out`."""
    world, folder = World.join(), out / "folder"
    for stage in STAGES:
        model, facts = learned(stage, split(world.size))
        keep(out, f"plain-{stage}", model, facts)

        model = fresh()
        shard_backbone(model)
        # The next stage's memory is attached to a backbone that is sharded already.
        model = attached(model.detach())
        shard_backbone(model)
        local = sum(p.to_local().numel() for p in model.host.parameters())  # type: ignore[attr-defined]
        whole = sum(p.numel() for p in model.host.parameters())
        config = split(world.size, gradient_checkpointing=True)
        facts = train_stage(model, stage, config, rows(), held_out())
        keep(out, f"sharded-{stage}", model, {**facts, "share": local / whole})

        # One process is told to stop: all save and stop, and go on together.
        text = rows()
        if world.rank == 1:
            text = dataclasses.replace(text, source=Stopping(text.source, text.count + 4 * STOP))
        with pytest.raises(Stopped) as stopped:
            train_stage(fresh(), stage, split(world.size), text, held_out(), folder / stage)
        model, facts = learned(stage, split(world.size), folder / stage, resume=True)
        keep(out, f"stopped-{stage}", model, {**facts, "stopped": str(stopped.value)})
    keep(out, "table", *table_state(world))


def keep(out: Path, name: str, model: AthenaModel, facts: dict[str, Any]) -> None:
    rank = World.current().rank
    save_file(state(model), out / f"{name}-{rank}.safetensors")
    (out / f"{name}-{rank}.json").write_text(json.dumps(facts))


def table_state(world: World) -> tuple[AthenaModel, dict[str, Any]]:
    """One step of stage memory, and what this process then holds of the table's gradient and optimiser state."""
    model, config = fresh(), split(world.size)
    learner = Learner.make(model, make_stage("memory", config.memory), config.memory, world)
    assert learner.rows is not None
    with learner.learning():
        batches = [rows().batch((world.rank * 2 + part) * 2, 2) for part in range(2)]
        learner.step(batches, 0, 6, None)
        states = [optimiser.state[learner.rows.parameter] for optimiser in learner.optimisers]
    known = [tensor for state in states for tensor in state.values() if len(tensor) == len(learner.rows.parameter)]
    facts = {"rows": len(learner.rows.weight), "own": len(learner.rows.parameter)}
    return model, facts | {"some": [int((tensor != 0).sum()) for tensor in known]}


# -- and what it was to be ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have left their results."""
    folder = tmp_path_factory.mktemp("distributed")
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES), "--module"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *launch, __name__, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@functools.cache
def alone(stage: str) -> tuple[AthenaModel, dict[str, Any]]:
    return learned(stage, split(1))


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("run", ["plain", "sharded", "stopped"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_are_one(stage: str, run: str, out: Path) -> None:
    found = [load_file(out / f"{run}-{stage}-{rank}.safetensors") for rank in range(PROCESSES)]
    facts = json.loads((out / f"{run}-{stage}-0.json").read_text())
    assert same(*found)
    model, expected = alone(stage)
    for name, value in state(model).items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-7, atol=1e-9)
    for ours, theirs in zip(facts["history"], expected["history"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
        assert ours.get("valid", {}) == pytest.approx(theirs.get("valid", {}), rel=1e-9)
    assert facts["best_step"] == expected["best_step"]


@pytest.mark.parametrize("stage", STAGES)
def test_no_process_holds_the_whole_sharded_backbone(stage: str, out: Path) -> None:
    shares = [json.loads((out / f"sharded-{stage}-{rank}.json").read_text())["share"] for rank in range(PROCESSES)]
    assert shares == pytest.approx([0.5, 0.5], abs=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_is_told_to_stop_and_all_do(stage: str, out: Path) -> None:
    """And resumed they are what they were to be, bit for bit."""
    for rank in range(PROCESSES):
        message = json.loads((out / f"stopped-{stage}-{rank}.json").read_text())["stopped"]
        assert message.startswith(f"stage {stage} stopped after step {STOP} of 6; the last complete checkpoint is ")
        through, stopped = (load_file(out / f"{run}-{stage}-{rank}.safetensors") for run in ("plain", "stopped"))
        assert same(through, stopped)


def test_no_process_has_optimiser_state_for_the_rows_of_another(out: Path) -> None:
    """Each row's state is in one process, and is not zero only where a text read the row."""
    found = [json.loads((out / f"table-{rank}.json").read_text()) for rank in range(PROCESSES)]
    assert sum(facts["own"] for facts in found) == found[0]["rows"]
    for facts in found:
        assert facts["some"]
        assert all(0 < some < facts["own"] / 2 for some in facts["some"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    process(Path(sys.argv[1]))
