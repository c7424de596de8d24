"""Captured CUDA graphs of the whole step write what ordinary decoding writes, also with the memory fused."""

import pytest

from tests.graphs import check_captured

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("sites", [(1, 3), (2,)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_captured_step_writes_what_ordinary_decoding_writes(name: str, sites: tuple[int, ...], fuse: bool) -> None:
    check_captured(name, sites, fuse)
