"""Text into token ids, in processes beside this one.

Imports little and sends little: each process pays for it again. A fast tokenizer travels as its JSON, so that the
processes need neither torch nor transformers.
"""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from memoryathena.errors import AthenaError

Ids = npt.NDArray[np.uint32]
Encode = Callable[[list[str]], list[Ids]]

LONG = 1 << 19  # characters of a document that is tokenised in pieces
AROUND, CUTS_TRIED = 256, 16
BETWEEN_WORDS = re.compile(r"(?<=\w\n)(?=\w)|(?<=\w)(?= \w)")

_encode: Encode | None = None  # of a process of the pool


def encoder(tokenizer: Any) -> Encode:
    """A function from texts to what `tokenizer(text, add_special_tokens=False)` gives for each."""
    batch = _batch_encoder(tokenizer)

    def encode(texts: list[str]) -> list[Ids]:
        short = iter(batch([text for text in texts if len(text) <= LONG]))
        return [next(short) if len(text) <= LONG else _encode_long(text, batch) for text in texts]

    return encode


def _batch_encoder(tokenizer: Any) -> Encode:
    if not isinstance(tokenizer, str):
        return lambda texts: [_array(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    core = Tokenizer.from_str(tokenizer)
    core.no_truncation()
    core.no_padding()
    return lambda texts: [_array(one.ids) for one in core.encode_batch_fast(texts, add_special_tokens=False)]


def _encode_long(text: str, batch: Encode) -> Ids:
    """A long text in pieces: whole, it would take a hundred times its size in memory (6.3 GB for 60 MB, measured)."""
    pieces, start = [], 0
    while len(text) - start > LONG and (stop := _safe_cut(text, start + LONG // 2, batch)) is not None:
        pieces += batch([text[start:stop]])
        start = stop
    return np.concatenate([*pieces, *batch([text[start:]])])


def _safe_cut(text: str, start: int, batch: Encode) -> int | None:
    """A place behind `start` where the text around it has the same tokens in two pieces as in one; None without any.

    There is none where a tokenizer puts a space before every text.
    """
    for match in islice(BETWEEN_WORDS.finditer(text, start), CUTS_TRIED):
        at = match.start()
        before, after = text[max(0, at - AROUND) : at], text[at : at + AROUND]
        first, second, both = batch([before, after, before + after])
        if np.array_equal(np.concatenate([first, second]), both):
            return at
    return None


class Pool:
    """Tokenises batches of texts; `depth` is how many may wait for their result without starving a process."""

    def __init__(self, tokenizer: Any, executor: ProcessPoolExecutor | None, depth: int):
        self.depth = depth
        self._executor = executor
        self._local = encoder(tokenizer) if executor is None else None

    def submit(self, texts: list[str]) -> Callable[[], list[Ids]]:
        """Begin a batch; the function that this returns waits for its ids."""
        if self._executor is None:
            assert self._local is not None
            return partial(self._local, texts)
        try:
            return partial(_result, self._executor.submit(_work, texts))
        except BrokenProcessPool:
            raise _broken() from None


@contextmanager
def pool(tokenizer: Any, workers: int) -> Iterator[Pool]:
    """So many processes; 0 tokenises in this one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    sent = tokenizer if backend is None else backend.to_str()
    if workers == 0:
        yield Pool(sent, None, 0)
        return
    # Forking would copy locks that threads of torch, rayon and rich may hold at that moment.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(sent,))
    try:
        yield Pool(sent, executor, 2 * workers)
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(tokenizer: Any) -> None:
    global _encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encode = encoder(tokenizer)


def _end_with_parent() -> None:
    """A killed parent tells nobody: without this its processes would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(texts: list[str]) -> list[Ids]:
    assert _encode is not None
    return _encode(texts)


def _result(future: Future[list[Ids]]) -> list[Ids]:
    try:
        return future.result()
    except BrokenProcessPool:
        raise _broken() from None


def _broken() -> AthenaError:
    return AthenaError(
        "a tokenising process ended, perhaps for lack of memory: run the same command again to go on, "
        "with fewer --workers"
    )


def _array(ids: list[int]) -> Ids:
    return np.array(ids, dtype=np.uint32)
