"""vLLM's own attention kernels, over paged memory of a pass's own.

One layer's worth of memory serves all layers, one after the other. What is not written in a layer
is another one's: all slots of a prompt up to a run's end must be written before that run attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from td_serve.rows import Rows


class PagedAttention:
    """The attention of one model's layers; `builder` makes the metadata of their backend."""

    def __init__(self, layers: Sequence[Any], builder: Any, like: torch.Tensor) -> None:
        self._layers = layers
        self._builder = builder
        self._like = like
        self.block_size = int(like.shape[2])

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
