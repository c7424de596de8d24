"""A checkpoint is complete or absent, whatever happens while it is written, and damage is named."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from memoryathena import AthenaError
from memoryathena.training import checkpoint
from memoryathena.training.checkpoint import (
    BEST,
    FACTS,
    STATE,
    checkpoints,
    clear_leftovers,
    last_complete,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from tests.training import same


def tensors(value: float) -> dict[str, Tensor]:
    return {"parameter/a": torch.full((3, 5), value), "random/cpu": torch.arange(9, dtype=torch.uint8)[None]}


def facts(best_step: int | None = None, **more: Any) -> dict[str, Any]:
    return {"stage": "memory", "options": {"seed": 0}, "best_step": best_step, "best_score": 1.5, **more}


def save(folder: Path, step: int, best_step: int | None = None, keep: int = 2, **more: Any) -> Path:
    best = {} if best_step is None else {"a": torch.full((3, 5), float(best_step))}
    return save_checkpoint(folder, step, tensors(step), best, facts(best_step, **more), keep)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert newest_checkpoint(folder) is None
    for step in (2, 9, 10):
        save(folder, step, best_step=2)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-9", "checkpoint-10"]
    found, best, said = load_checkpoint(folder / "checkpoint-10")
    assert same(found, tensors(10))
    assert same(best, {"a": torch.full((3, 5), 2.0)})
    assert said["step"] == 10
    assert said["stage"] == "memory"
    assert last_complete(folder).endswith("checkpoint-10, to go on from with --resume")
    assert last_complete(tmp_path) == last_complete(None) == "the last complete checkpoint is none"


def test_the_best_is_written_once(tmp_path: Path) -> None:
    """A large table is not copied at every checkpoint; what is another run's, or no longer the best, is."""
    paths = [save(tmp_path, 1, 1, 9), save(tmp_path, 2, 1, 9), save(tmp_path, 3, 2, 9), save(tmp_path, 4, 2, 9, data=1)]
    first, again, better, other = (os.stat(path / BEST).st_ino for path in paths)
    assert first == again
    assert len({again, better, other}) == 3


def test_a_run_begun_anew_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for step in (4, 8):
        save(tmp_path, step)
    save_checkpoint(tmp_path, 4, tensors(7), {}, facts(), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert same(load_checkpoint(tmp_path / "checkpoint-4")[0], tensors(7))


@pytest.mark.parametrize(("there", "expected"), [((2, 4), {(4, 2), (6, 3)}), ((6, 8), {(8, 2), None, (6, 3)})])
def test_killed_at_every_line(there: tuple[int, ...], expected: set[tuple[int, int] | None], tmp_path: Path) -> None:
    """SIGKILL before each line that writes while checkpoint 6 is made, beside its own run's older ones and in place
    of another run's: what is found is whole, and another run's only where nothing of this one exists."""
    line, code, found = 0, signal.SIGKILL, set()
    while code == signal.SIGKILL:
        folder = tmp_path / str(line)
        for step in there:
            save(folder, step, best_step=2, keep=3)
        code = in_child(lambda line=line, folder=folder: killed_at(line, lambda: save(folder, 6, best_step=3)))
        newest = newest_checkpoint(folder)
        if newest is not None:
            saved, best, said = load_checkpoint(newest)
            assert same(saved, tensors(said["step"]))
            assert same(best, {"a": torch.full((3, 5), float(said["best_step"]))})
        found.add(None if newest is None else (said["step"], said["best_step"]))
        clear_leftovers(folder)
        assert [path for path in folder.iterdir() if path not in checkpoints(folder)] == []
        assert newest_checkpoint(folder) == newest
        line += 1
    assert code == 0
    assert line > 20
    assert found == expected


def in_child(work: Callable[[], object]) -> int:
    """Do it in a process of its own; returns the signal that ended it, or 0."""
    if (pid := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def killed_at(number: int, work: Callable[[], object]) -> None:
    """Die by SIGKILL before this line."""
    left = number

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_filename != checkpoint.__file__ or code.co_name not in ("save_checkpoint", "_remove"):
            return None
        if event == "line":
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return trace

    sys.settrace(trace)
    work()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL_SAID_BY_SAFETENSORS = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("memoryathena.training.checkpoint.tempfile.mkdtemp", FULL),
        ("memoryathena.training.checkpoint.save_file", FULL_SAID_BY_SAFETENSORS),
        ("memoryathena.training.checkpoint.os.fsync", FULL),
        ("pathlib.Path.write_text", FULL),
        ("pathlib.Path.replace", FULL),
    ],
)
def test_a_full_disk_keeps_the_last_one(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)

    def full(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(AthenaError) as met:
            save(tmp_path, 4)
    assert str(met.value).startswith(f"cannot write {tmp_path / 'checkpoint-4'}: ")
    assert "No space left on device" in str(met.value)
    assert str(met.value).endswith(
        f"the last complete checkpoint is {tmp_path / 'checkpoint-2'}, to go on from with --resume"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert same(load_checkpoint(tmp_path / "checkpoint-2")[0], tensors(2))


@pytest.mark.parametrize("name", [STATE, BEST, FACTS])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_is_named(name: str, damage: str, tmp_path: Path) -> None:
    save(tmp_path, 2)
    path = save(tmp_path, 4, best_step=3) / name
    content = path.read_bytes()
    path.unlink()
    if damage == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(AthenaError, match=r"checkpoint-4 is damaged \(.+\): delete it to resume from the one before$"):
        load_checkpoint(path.parent)
    if name == FACTS and damage == "gone":  # which is what makes it complete
        assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_facts_of_another_kind_are_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    for text in ("[]", "{}", json.dumps({"files": {}}), "\udcff"):
        (path / FACTS).write_text(text, errors="surrogateescape")
        with pytest.raises(AthenaError, match="is damaged"):
            load_checkpoint(path)
