"""Cells beside each other, a process each, dealt out over the devices.

Two cells that need the same unfinished stage wait for one another: it is made once. A process is the command line of
one cell, which any scheduler of a cluster could have started as well.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from memoryathena.errors import AthenaError
from memoryathena.studies.config import Cell, Study
from memoryathena.studies.stages import finished, needed
from memoryathena.training.run import write_json
from memoryathena.training.trouble import Interrupts, Stopped

WAIT_S = 0.2
PROGRAM = "from memoryathena.cli import main; main()"


@dataclasses.dataclass
class Worker:
    """A cell that runs."""

    cell: Cell
    process: subprocess.Popen[bytes]
    device: int
    log: Path
    needs: list[Path]


def devices() -> list[str]:
    """The CUDA devices that this process may use, by the names that CUDA_VISIBLE_DEVICES has for them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(index) for index in range(torch.cuda.device_count())]


def run_beside(
    study: Study, cells: Sequence[Cell], out: Path, processes: int, done: Callable[[Cell, str | None], None]
) -> None:
    """Run the cells; `done` is told of each, with its error's line where it failed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise AthenaError("under torchrun all processes share each cell: give no --processes")
    file, names = out / "study.json", devices()
    write_json(file, study.model_dump(mode="json"))
    waiting, running, known = list(cells), list[Worker](), dict[str, list[Path]]()
    with Interrupts(enabled=True) as interrupts:
        try:
            while waiting or running:
                for worker in [one for one in running if one.process.poll() is not None]:
                    running.remove(worker)
                    done(worker.cell, _error(worker))
                while len(running) < processes and (ready := _next(waiting, running, out, known)) is not None:
                    cell, needs = ready
                    waiting.remove(cell)
                    try:
                        running.append(_start(cell, needs, file, out, names, running))
                    except OSError as error:
                        done(cell, f"cannot start a process: {error.strerror}")
                if interrupts.caught:
                    raise Stopped(f"study {study.name} stopped; the same command goes on", interrupts.caught)
                time.sleep(WAIT_S)
        finally:
            for worker in running:
                worker.process.terminate()  # each saves where it is
            for worker in running:
                worker.process.wait()


def _next(
    waiting: list[Cell], running: list[Worker], out: Path, known: dict[str, list[Path]]
) -> tuple[Cell, list[Path]] | None:
    """The first cell none of whose unfinished stages is being made; what fails to say its stages fails by itself."""
    busy = {place for worker in running for place in worker.needs if not finished(place)}
    for cell in waiting:
        if cell.name not in known:
            try:
                known[cell.name] = needed(cell, out)
            except AthenaError:
                return cell, []
        if not busy & {place for place in known[cell.name] if not finished(place)}:
            return cell, known[cell.name]
    return None


def _start(cell: Cell, needs: list[Path], file: Path, out: Path, names: list[str], running: list[Worker]) -> Worker:
    """On the device with the fewest cells."""
    taken = [worker.device for worker in running]
    device = min(range(max(len(names), 1)), key=taken.count)
    log = out / "logs" / f"{cell.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": names[device]} if names else {})}
    command = [sys.executable, "-c", PROGRAM, "study", str(file), "--out", str(out), "--only", cell.name]
    with log.open("wb") as file_of_log:
        process = subprocess.Popen(
            [*command, "--processes", "1"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file_of_log,
            start_new_session=True,  # a Ctrl-C reaches it through this process, once
        )
    return Worker(cell, process, device, log, needs)


def _error(worker: Worker) -> str | None:
    """None, or the line in which it said what went wrong."""
    code = worker.process.returncode
    if code == 0:
        return None
    lines = [line for line in worker.log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].removeprefix("athena: ") if lines else "it said nothing"
    alone = last.partition(f"the first is {worker.cell.name}: ")[2] or last
    return alone if code > 0 else f"its process was ended by signal {-code}; {alone}"
