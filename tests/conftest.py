"""Two workers share two cores: one thread each, and no network for anyone."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


@pytest.fixture
def athena_cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """One call of the command line: exit code, standard output, standard error."""
    from memoryathena import cli

    def run(*args: Any) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["athena", *map(str, args)])
        monkeypatch.setattr(cli.console, "_width", 200)
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
