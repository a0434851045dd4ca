"""vLLM's own attention kernels, over paged memory of a pass's own.

One layer's worth of memory serves all layers, one after the other. What is not written in a layer
is another one's: all slots of a prompt up to a run's end must be written before that run attends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from td_kernels.planes import Planes
from td_serve.errors import ModelError
from td_serve.rows import Rows

_BASE = 64


class _Strides(NamedTuple):
    """Where in a block a token's numbers stand."""

    start: int
    token: int
    head: int
    number: int

    def of(self, tokens: int, heads: tuple[int, int]) -> torch.Tensor:
        """[tokens, KV heads * head size]."""
        token, head, number = (torch.arange(count) for count in (tokens, *heads))
        places = (
            self.start
            + token[:, None, None] * self.token
            + head[None, :, None] * self.head
            + number[None, None] * self.number
        )
        return places.flatten(1)


class PagedAttention:
    """The attention of one model's layers; `builder` makes the metadata of their backend.

    Raises ModelError where what is written to its pages does not stand there.
    """

    def __init__(self, layers: Sequence[Any], builder: Any, like: torch.Tensor) -> None:
        self._layers = layers
        self._builder = builder
        self._like = like
        self.block_size = int(like.shape[2])
        self._places = self._find_places()

    def memory(self, blocks: int) -> torch.Tensor:
        """Room for `blocks` blocks of one layer, laid out like the engine's own pages."""
        _, *block = self._like.shape
        return torch.zeros(blocks, *block, dtype=self._like.dtype, device=self._like.device)

    def plan(self, rows: Rows) -> Any:
        """The backend's metadata for `rows`, the same in every layer."""
        starts = torch.tensor(rows.starts, dtype=torch.int32)
        lengths = torch.tensor(rows.lengths, dtype=torch.int32)
        first = torch.tensor(rows.tables, dtype=torch.int32)[:, None]
        tables = first + torch.arange(rows.widest, dtype=torch.int32)[None]
        device = self._like.device
        return self._builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=lengths.to(device),
                num_reqs=len(rows.lengths),
                num_actual_tokens=len(rows.positions),
                max_query_len=int((starts[1:] - starts[:-1]).max()),
                max_seq_len=int(lengths.max()),
                # A short prompt's row reaches beyond its own blocks, never beyond the memory.
                block_table_tensor=tables.clamp_(max=rows.blocks - 1).contiguous().to(device),
                slot_mapping=torch.tensor(rows.slots, device=device),
                causal=True,
            ),
        )

    def write(
        self,
        layer: int,
        memory: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Put keys (rotated) and values, [tokens, KV heads * head size], into slots."""
        attention = self._layers[layer]
        heads = (-1, attention.num_kv_heads, attention.head_size)
        attention.impl.do_kv_cache_update(
            attention, key.view(heads), value.view(heads), memory, slots
        )

    def slots(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens at `positions` of a prompt stand that has these blocks; all int64."""
        size = self.block_size
        return blocks[positions // size] * size + positions % size

    def read(
        self, memory: torch.Tensor, blocks: Sequence[int], first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys (rotated) and values of tokens [first, last) of a prompt that stands in
        `blocks`, [tokens, KV heads * head size], from one layer's pages."""
        size = self.block_size
        some = blocks[first // size : -(-last // size)]
        pages = memory[torch.tensor(some, dtype=torch.int64)].flatten(1)
        keys, values = (pages[:, places.flatten()] for places in self._places)
        width = self._places.shape[-1]
        wanted = slice(first % size, first % size + last - first)
        return keys.view(-1, width)[wanted], values.view(-1, width)[wanted]

    @functools.cached_property
    def is_strided(self) -> bool:
        """Whether what a token has in a block stands at equal distances, so that `planes` are."""
        return all(
            torch.equal(places, self._strides(places).of(places.shape[0], self._heads))
            for places in self._places
        )

    def planes(self, memory: torch.Tensor) -> Planes:
        """One layer's pages as views, keys and values, [blocks, tokens, KV heads, head size]."""
        assert self.is_strided, "these pages are no views of one memory"
        made = []
        for places in self._places:
            by = self._strides(places)
            made.append(
                memory.as_strided(
                    (len(memory), self.block_size, *self._heads),
                    (memory.stride(0), by.token, by.head, by.number),
                    memory.storage_offset() + by.start,
                )
            )
        return Planes(*made)

    @property
    def _heads(self) -> tuple[int, int]:
        """KV heads, and a head's size."""
        attention = self._layers[0]
        return attention.num_kv_heads, attention.head_size

    def _strides(self, places: torch.Tensor) -> _Strides:
        heads, size = self._heads
        start = int(places[0, 0])
        return _Strides(
            start,
            token=int(places[1, 0]) - start,
            head=int(places[0, size]) - start if heads > 1 else 0,
            number=int(places[0, 1]) - start,
        )

    def attended(self, layer: int, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """How much the last rows of a prompt attend to each of its tokens, [tokens]: the mean over
        those rows and this rank's heads.

        `query` is theirs, [rows, heads * head size]; `keys` are all tokens', both rotated.
        """
        attention = self._layers[layer]
        heads, size, kv_heads = attention.num_heads, attention.head_size, attention.num_kv_heads
        rows, tokens = len(query), len(keys)
        ahead = torch.arange(tokens) > torch.arange(tokens - rows, tokens)[:, None]
        total = torch.zeros(tokens)
        # One KV head after the other: all heads' scores at once would be large.
        grouped = query.float().view(rows, kv_heads, heads // kv_heads, size).unbind(1)
        for asking, key in zip(
            grouped, keys.float().view(tokens, kv_heads, size).unbind(1), strict=True
        ):
            scores = torch.einsum("rhs,ts->hrt", asking, key) * attention.impl.scale
            total += scores.masked_fill(ahead, -torch.inf).softmax(-1).sum((0, 1))
        return total / (heads * rows)

    def _find_places(self) -> torch.Tensor:
        """Where in a block each number stands, [keys and values, tokens, KV heads * head size].

        Backends pack keys as their instructions like them: what they write is looked for.
        """
        attention = self._layers[0]
        shape = (2, self.block_size, attention.num_kv_heads * attention.head_size)
        names = torch.arange(math.prod(shape))
        found = torch.zeros(self.memory(1).numel(), dtype=torch.int64)
        digit = 1
        while digit < len(names):
            # In digits that any number format holds exactly; 0 is what is written nowhere.
            part = (names // digit % _BASE + 1).view(shape).to(self._like)
            memory = self.memory(1)
            self.write(0, memory, part[0], part[1], torch.arange(self.block_size))
            found += (memory.flatten().long().cpu() - 1) * digit
            digit *= _BASE
        places = torch.full((len(names),), -1)
        (written,) = (found >= 0).nonzero(as_tuple=True)
        places[found[written]] = written
        if (places < 0).any():
            raise ModelError("what is written to the engine's pages does not stand there")
        return places.view(shape)

    def attend(
        self,
        layer: int,
        memory: torch.Tensor,
        plan: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """What the planned rows attend to, [rows, heads * head size]; their own KV is written."""
        attention = self._layers[layer]
        heads, size = attention.num_heads, attention.head_size
        queries = query.view(-1, heads, size)
        output = torch.empty_like(queries)
        attention.impl.forward(
            attention,
            queries,
            key.view(-1, attention.num_kv_heads, size),
            value.view(-1, attention.num_kv_heads, size),
            memory,
            plan,
            output,
        )
        return output.view(-1, heads * size)
