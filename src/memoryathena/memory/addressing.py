"""Tokens -> canonical keys -> row numbers, for a whole batch at once or a few tokens at a time.

Each mode carries a small integer state per position: enough to go on from there, so that decoding needs only the
last state, and a cache that is cut back needs only the state at the cut.

Shapes: B batch, T positions, K keys of the longest n-gram (newest first), H heads, S state, N scan elements.
"""

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from memoryathena.memory.hashing import SCHEMES, HashConstants, signed
from memoryathena.memory.text import LETTER, SPACE, SYMBOL, fold
from memoryathena.memory.vocabulary import (
    BASE,
    BYTE_VALUES,
    LISTED,
    NONE,
    PENDING_NONE,
    PRIVATE,
    Piece,
    PieceTable,
    character_pieces,
    continuation,
    pending,
    piece,
    signed_tensor,
    split_utf8,
    token_keys,
    vocabulary_indices,
)
from memoryathena.memory.window import last_index, lookback, shift, take


class Keyer(torch.nn.Module, abc.ABC):
    """A canonicalisation mode: token ids -> the last K canonical keys at every position.

    special_V marks the tokens that are never in a key (control tokens, padding, ids beyond the tokenizer).
    """

    special_V: Tensor

    def __init__(self, tokens: Sequence[bytes | None], constants: HashConstants, depth: int):
        super().__init__()
        self.depth = depth
        self.begin, self.empty = signed(constants.begin), signed(constants.empty)
        self.register_buffer("special_V", torch.tensor([t is None for t in tokens]), persistent=False)

    @abc.abstractmethod
    def initial(self, batch: int) -> Tensor:
        """State_BS before the first token of a document."""

    @abc.abstractmethod
    def forward(self, ids_BT: Tensor, valid_BT: Tensor, starts_BT: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys_BTK (newest first) and states_BTS, the state after each position."""

    @abc.abstractmethod
    def step(self, ids_B: Tensor, valid_B: Tensor, starts_B: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        """One position of `forward` without its scans: keys_BK and the new state_BS."""


class TokenKeyer(Keyer):
    """Mode `token`: one key per token. Its state is the last K keys."""

    key_V: Tensor

    def __init__(self, tokens: Sequence[bytes | None], constants: HashConstants, depth: int, in_order: bool = False):
        super().__init__(tokens, constants, depth)
        keys = vocabulary_indices(tokens) if in_order else token_keys(tokens)
        self.register_buffer("key_V", signed_tensor(keys), persistent=False)

    def initial(self, batch: int) -> Tensor:
        """All keys are the begin key."""
        return torch.full((batch, self.depth), self.begin, device=self.key_V.device)

    def forward(self, ids_BT: Tensor, valid_BT: Tensor, starts_BT: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        """See `Keyer.forward`."""
        K = self.depth
        # The carried keys stand in front, oldest first, as if they were tokens of this document.
        keys_BN = torch.cat([state_BS.flip(1), self.key_V[ids_BT]], dim=1)
        front_BK = torch.ones_like(state_BS, dtype=torch.bool)
        valid_BN = torch.cat([front_BK, valid_BT & ~self.special_V[ids_BT]], dim=1)
        starts_BN = torch.cat([torch.zeros_like(front_BK), starts_BT], dim=1)
        floor_BN = last_index(starts_BN)
        newest_BN = last_index(valid_BN)
        newest_BN = torch.where(newest_BN >= floor_BN, newest_BN, -1)
        steps_BNK = take(lookback(valid_BN, starts_BN, K), newest_BN)
        window_BNK = torch.where(newest_BN[..., None] >= 0, steps_BNK, -1)[:, K:]
        flat_BX = torch.gather(keys_BN, 1, window_BNK.clamp(min=0).flatten(1))
        keys_BTK = torch.where(window_BNK >= 0, flat_BX.view_as(window_BNK), self.begin)
        return keys_BTK, keys_BTK

    def step(self, ids_B: Tensor, valid_B: Tensor, starts_B: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        """See `Keyer.step`."""
        before_BK = torch.where(starts_B[:, None], self.begin, state_BS)
        grown_BK = torch.cat([self.key_V[ids_B][:, None], before_BK[:, :-1]], dim=1)
        keys_BK = torch.where((valid_B & ~self.special_V[ids_B])[:, None], grown_BK, before_BK)
        return keys_BK, keys_BK


class WordKeyer(Keyer):
    """Mode `word`: keys are the current, possibly unfinished word and the words before it.

    Its state: the last K words, the class of the last character, and a begun UTF-8 character. The scan is closed
    form: with prefix products G of the factors base**length and prefix sums C of hash / G, the hash of the text
    between two positions is G[t] * (C[t] - C[u]), all modulo 2**64 (the base is odd, so 1 / G exists).
    """

    lead_V3: Tensor
    tail_V: Tensor
    byte_values: Tensor
    begin_S: Tensor

    def __init__(self, tokens: Sequence[bytes | None], constants: HashConstants, depth: int):
        super().__init__([data or None for data in tokens], constants, depth)  # a token without bytes is no token
        pieces, lead, tail = [], [], []
        for data in tokens:
            before, middle, after = split_utf8(data or b"")
            pieces.append(piece("".join(map(fold, middle.decode("utf-8", "ignore")))))
            # More than three continuation bytes never help: the fourth is a stray.
            lead.append((min(len(before), 3), continuation(before[:3]), int(len(before) == len(data or b""))))
            tail.append(pending(after))
        self.tokens = PieceTable(pieces, depth)
        self.has_fragments = any(n for n, _, _ in lead) or any(tail)
        self.characters = PieceTable(character_pieces() if self.has_fragments else [_NOTHING], depth)
        self.register_buffer("lead_V3", torch.tensor(lead), persistent=False)
        self.register_buffer("tail_V", torch.tensor(tail), persistent=False)
        self.register_buffer("byte_values", signed_tensor(BYTE_VALUES), persistent=False)
        begin = [self.begin] * depth + [SPACE, PENDING_NONE]
        self.register_buffer("begin_S", torch.tensor(begin), persistent=False)

    def initial(self, batch: int) -> Tensor:
        """Begin words, as after white space, nothing pending."""
        return self.begin_S.expand(batch, -1)

    def forward(self, ids_BT: Tensor, valid_BT: Tensor, starts_BT: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        """See `Keyer.forward`."""
        K = self.depth
        real_BT = valid_BT & ~self.special_V[ids_BT]
        columns_BTC = self.tokens.columns_VC[ids_BT]
        if self.has_fragments:
            cut_BTC, pending_BT = self._cut_characters(ids_BT, real_BT, starts_BT, state_BS[:, -1])
            # A character completed by a token comes before the token's own text: two scan elements per token.
            columns_BNC = torch.stack([cut_BTC, columns_BTC], dim=2).flatten(1, 2)
            real_BN = real_BT.repeat_interleave(2, dim=1)
            starts_BN = torch.stack([starts_BT, torch.zeros_like(starts_BT)], dim=2).flatten(1, 2)
            words_BNK, last_BN = self._scan(columns_BNC, real_BN, starts_BN, state_BS)
            words_BTK, last_BT = words_BNK[:, 1::2], last_BN[:, 1::2]
        else:
            pending_BT = torch.zeros_like(ids_BT)
            words_BTK, last_BT = self._scan(columns_BTC, real_BT, starts_BT, state_BS)
        # After white space the current word is not begun yet.
        shifted_BTK = torch.cat([torch.full_like(words_BTK[..., :1], self.empty), words_BTK[..., : K - 1]], dim=-1)
        keys_BTK = torch.where((last_BT == SPACE)[..., None], shifted_BTK, words_BTK)
        return keys_BTK, torch.cat([words_BTK, last_BT[..., None], pending_BT[..., None]], dim=-1)

    def step(self, ids_B: Tensor, valid_B: Tensor, starts_B: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        """See `Keyer.step`."""
        K = self.depth
        real_B = valid_B & ~self.special_V[ids_B]
        words_BK = torch.where(starts_B[:, None], self.begin, state_BS[:, :K])
        last_B = torch.where(starts_B, SPACE, state_BS[:, K])
        pending_B = torch.where(starts_B, PENDING_NONE, state_BS[:, K + 1])
        if self.has_fragments:
            length_B, payload_B, all_lead_B = self.lead_V3[ids_B].unbind(-1)
            code_B = _completed(pending_B, length_B, payload_B)
            words_BK, last_B = self._append(self._character(code_B), real_B, words_BK, last_B)
            open_B = torch.where(all_lead_B == 1, _grown(pending_B, length_B, payload_B), self.tail_V[ids_B])
            pending_B = torch.where(real_B, open_B, pending_B)
        words_BK, last_B = self._append(self.tokens.columns_VC[ids_B], real_B, words_BK, last_B)
        shifted_BK = torch.cat([torch.full_like(words_BK[:, :1], self.empty), words_BK[:, : K - 1]], dim=1)
        keys_BK = torch.where((last_B == SPACE)[:, None], shifted_BK, words_BK)
        return keys_BK, torch.cat([words_BK, last_B[:, None], pending_B[:, None]], dim=1)

    def _append(self, columns_BC: Tensor, real_B: Tensor, words_BK: Tensor, last_B: Tensor) -> tuple[Tensor, Tensor]:
        """The words after one more piece: its head goes on with the last word or is a new one, then its own words."""
        head_B, factor_B, _, first_B, piece_last_B, count_B = columns_BC[:, :6].unbind(1)
        present_B = real_B & (first_B != NONE)
        has_head_B = present_B & (first_B == LETTER)
        continued_BK = torch.cat([(words_BK[:, 0] * factor_B + head_B)[:, None], words_BK[:, 1:]], dim=1)
        pushed_BK = torch.cat([head_B[:, None], words_BK[:, :-1]], dim=1)
        headed_BK = torch.where((last_B == LETTER)[:, None], continued_BK, pushed_BK)
        headed_BK = torch.where(has_head_B[:, None], headed_BK, words_BK)
        age_BK = torch.arange(self.depth, device=head_B.device) - count_B[:, None]
        older_BK = torch.gather(headed_BK, 1, age_BK.clamp(min=0))
        grown_BK = torch.where(age_BK < 0, columns_BC[:, 6:], older_BK)
        return (
            torch.where(present_B[:, None], grown_BK, words_BK),
            torch.where(present_B, piece_last_B, last_B),
        )

    def _scan(self, columns_BNC: Tensor, real_BN: Tensor, starts_BN: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The last K words (newest first) and the class of the last character after every element."""
        K = self.depth
        # The carried state is element 0: K whole words and a last character.
        zero_B, one_B = torch.zeros_like(state_BS[:, 0]), torch.ones_like(state_BS[:, 0])
        carried = [zero_B, one_B, one_B, one_B * SPACE, state_BS[:, K], one_B * K, *state_BS[:, :K].unbind(1)]
        columns_BNC = torch.cat([torch.stack(carried, dim=1)[:, None], columns_BNC], dim=1)
        false_B1 = torch.zeros_like(real_BN[:, :1])
        starts_BN = torch.cat([false_B1, starts_BN], dim=1)
        head_BN, factor_BN, inverse_BN, first_BN, last_BN, count_BN = columns_BNC[..., :6].unbind(-1)
        present_BN = torch.cat([~false_B1, real_BN], dim=1) & (first_BN != NONE)
        floor_BN = last_index(starts_BN).clamp(min=0)

        newest_BN = last_index(present_BN)
        seen_BN = newest_BN >= floor_BN
        last_here_BN = torch.where(seen_BN, take(last_BN, newest_BN), SPACE)
        last_before_BN = torch.where(starts_BN, SPACE, shift(last_here_BN, SPACE))
        has_head_BN = present_BN & (first_BN == LETTER)
        continues_BN = has_head_BN & (last_before_BN == LETTER)
        # A head that continues nothing is a word of its own, older than the piece's other words.
        begun_BN = torch.where(present_BN, count_BN + (has_head_BN & ~continues_BN), 0)
        k_K = torch.arange(K, device=head_BN.device)
        own_BNK = torch.where(k_K == count_BN[..., None], head_BN[..., None], columns_BNC[..., 6:])

        begins_BN = begun_BN > 0
        opener_BN = last_index(begins_BN)
        opened_BN = opener_BN >= floor_BN
        extends_BN = continues_BN & ~begins_BN
        appended_BN = torch.where(begins_BN, own_BNK[..., 0], torch.where(extends_BN, head_BN, 0))
        G_BN = torch.where(extends_BN, factor_BN, 1).cumprod(1)
        inverse_G_BN = torch.where(extends_BN, inverse_BN, 1).cumprod(1)
        C_BN = (appended_BN * inverse_G_BN).cumsum(1)
        before_opener_BN = torch.where(opener_BN > 0, take(C_BN, opener_BN - 1), 0)
        newest_word_BN = torch.where(opened_BN, G_BN * (C_BN - before_opener_BN), self.begin)

        # The word that an element finished by beginning another: the one before it, with its own head if it went on.
        finished_BN = torch.where(starts_BN, self.begin, shift(newest_word_BN, self.begin))
        finished_BN = torch.where(continues_BN, finished_BN * factor_BN + head_BN, finished_BN)
        begun_at_BN, finished_at_BN = take(begun_BN, opener_BN), take(finished_BN, opener_BN)
        own_at_BNK = take(own_BNK, opener_BN)
        words = [newest_word_BN]
        for k in range(1, K):  # over the words of an n-gram, not over positions
            older_BN = finished_at_BN
            for j in range(1, k):  # the element begun k - j words: what it lacks is word j of just before it
                earlier_BN = torch.where(starts_BN, self.begin, shift(words[j], self.begin))
                older_BN = torch.where(begun_at_BN == k - j, take(earlier_BN, opener_BN), older_BN)
            older_BN = torch.where(begun_at_BN > k, own_at_BNK[..., k], older_BN)
            words.append(torch.where(opened_BN, older_BN, self.begin))
        return torch.stack(words, dim=-1)[:, 1:], last_here_BN[:, 1:]

    def _cut_characters(
        self, ids_BT: Tensor, real_BT: Tensor, starts_BT: Tensor, pending_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Characters whose bytes lie in several tokens: the piece each token completes, and what stays begun.

        As a decoder that ignores errors: bytes that make no character are nothing.
        """
        front_B1 = torch.ones_like(real_BT[:, :1])
        valid_BN = torch.cat([front_B1, real_BT], dim=1)
        starts_BN = torch.cat([~front_B1, starts_BT], dim=1)
        lead_BN3 = torch.nn.functional.pad(self.lead_V3[ids_BT], (0, 0, 1, 0))
        length_BN, payload_BN, all_lead_BN = lead_BN3.unbind(-1)
        own_BN = torch.cat([pending_B[:, None], self.tail_V[ids_BT]], dim=1)
        before_BN = lookback(valid_BN, starts_BN, 2)[..., 1]
        passes_BN = (all_lead_BN == 1) & valid_BN
        open_BN = torch.where(passes_BN, PENDING_NONE, own_BN)
        for _ in range(3):  # a character has at most four bytes, so at most three tokens go on with it
            was_BN = torch.where(before_BN >= 0, take(open_BN, before_BN), PENDING_NONE)
            open_BN = torch.where(passes_BN, _grown(was_BN, length_BN, payload_BN), own_BN)
        was_BN = torch.where(before_BN >= 0, take(open_BN, before_BN), PENDING_NONE)
        code_BN = torch.where(valid_BN, _completed(was_BN, length_BN, payload_BN), -1)
        cut_BNC = self._character(code_BN)
        newest_BN = last_index(valid_BN)
        open_here_BN = torch.where(newest_BN >= last_index(starts_BN), take(open_BN, newest_BN), PENDING_NONE)
        return cut_BNC[:, 1:], open_here_BN[:, 1:]

    def _character(self, code_BN: Tensor) -> Tensor:
        """Piece columns of a character, all zero for none (-1)."""
        index_BN, base = torch.full_like(code_BN, -1), 0
        for start, end in LISTED:
            inside_BN = (code_BN >= start) & (code_BN < end)
            index_BN = torch.where(inside_BN, code_BN - start + base, index_BN)
            base += end - start
        listed_BN = index_BN >= 0
        columns_BNC = self.characters.columns_VC[index_BN.clamp(min=0)]
        hash_BN = torch.zeros_like(code_BN)
        for bits, mark in ((18, 0xF0), (12, 0x80), (6, 0x80), (0, 0x80)):  # the four bytes of a character up there
            hash_BN = hash_BN * signed(BASE) + self.byte_values[(code_BN.clamp(min=0) >> bits & 0x3F) | mark]
        private_BN = (code_BN >= PRIVATE) & (code_BN & 0xFFFF < 0xFFFE)
        kind_BN = torch.where(private_BN, SYMBOL, LETTER)
        high_BNC = torch.zeros_like(columns_BNC)
        high_BNC[..., 0] = torch.where(private_BN, 0, hash_BN)
        high_BNC[..., 1] = torch.where(private_BN, 1, signed(pow(BASE, 4, 1 << 64)))
        high_BNC[..., 2] = torch.where(private_BN, 1, signed(pow(BASE, -4, 1 << 64)))
        high_BNC[..., 3] = high_BNC[..., 4] = kind_BN
        high_BNC[..., 5] = private_BN.long()
        high_BNC[..., 6] = torch.where(private_BN, hash_BN, 0)
        columns_BNC = torch.where(listed_BN[..., None], columns_BNC, high_BNC)
        return torch.where((code_BN >= 0)[..., None], columns_BNC, 0)


_NOTHING = Piece(0, 0, NONE, NONE, ())


def _grown(was: Tensor, length: Tensor, payload: Tensor) -> Tensor:
    """What stays begun of a pending character after `length` more continuation bytes; nothing once it is whole."""
    have, need = (was >> 4 & 15) + length, was & 15
    value = (was >> 8) << (6 * length) | payload
    return torch.where(have < need, value << 8 | have << 4 | need, PENDING_NONE)


def _completed(was: Tensor, length: Tensor, payload: Tensor) -> Tensor:
    """The character that these continuation bytes complete, -1 for none."""
    need = was & 15
    missing = need - (was >> 4 & 15)
    done = (was != PENDING_NONE) & (length >= missing)
    # Continuation bytes beyond the character's own are strays.
    code = (was >> 8) << (6 * missing) | payload >> (6 * (length - missing).clamp(min=0))
    least = torch.where(need == 4, 0x10000, torch.where(need == 3, 0x800, 0x80))
    surrogate = (code >= 0xD800) & (code < 0xE000)
    return torch.where(done & (code >= least) & (code <= 0x10FFFF) & ~surrogate, code, -1)


class Addressing(torch.nn.Module):
    """The whole way from token ids to row numbers of one table, for one tokenizer."""

    def __init__(
        self,
        tokens: Sequence[bytes | None],
        orders: tuple[int, ...],
        rows: int,
        canonical: str,
        scheme: str,
        constants: HashConstants,
    ):
        super().__init__()
        depth = max(orders)
        if canonical == "word":
            self.keyer: Keyer = WordKeyer(tokens, constants, depth)
        else:
            self.keyer = TokenKeyer(tokens, constants, depth, in_order=scheme == "xmem_v1")
        self.hash = SCHEMES[scheme](constants, rows, depth)

    def initial(self, batch: int) -> Tensor:
        """State_BS before any token."""
        return self.keyer.initial(batch)

    def forward(
        self,
        ids_BT: Tensor,
        valid_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
        state_BS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Row numbers rows_BTH (within each head) and the state after every position, states_BTS.

        valid_BT: False at padding. starts_BT: True at the first token of a document. state_BS: from the positions
        before, none at the beginning.
        """
        valid_BT = torch.ones_like(ids_BT, dtype=torch.bool) if valid_BT is None else valid_BT
        starts_BT = torch.zeros_like(valid_BT) if starts_BT is None else starts_BT
        state_BS = self.initial(ids_BT.shape[0]) if state_BS is None else state_BS
        if ids_BT.shape[1] == 1:  # decoding: a handful of operations instead of the scans over positions
            keys_BK, state_BS = self.keyer.step(ids_BT[:, 0], valid_BT[:, 0], starts_BT[:, 0], state_BS)
            return self.hash(keys_BK[:, None]), state_BS[:, None]
        keys_BTK, states_BTS = self.keyer(ids_BT, valid_BT, starts_BT, state_BS)
        return self.hash(keys_BTK), states_BTS
