"""A key/value cache with one row per sequence and one slot per position, so that rejected tokens need no cropping.

Slot j of row r holds position j of that sequence. `update` writes the packed keys of one forward pass to their slots
and returns the rows whole; what lies beyond a row's own length is masked by the attention and overwritten later.
Both the target (verification) and the drafter (context and block) use it.
"""

import torch
from transformers.cache_utils import Cache

from .attention import PackedBatch


class RaggedCache(Cache):
    """Keys and values `[rows, kv_heads, slots, head_dim]` per layer, grown as needed.

    Call `begin(batch)` before each forward pass of the model that the cache is given to.

    Args:
        offloaded: keep everything in the CPU's memory; a layer's rows are on the model's device only while it runs.
    """

    def __init__(self, offloaded: bool = False):
        super().__init__(layers=[])
        self.offloaded = offloaded
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.devices: list[torch.device] = []
        self.batch: PackedBatch | None = None

    def begin(self, batch: PackedBatch) -> None:
        """Announces the tokens of the next forward pass."""
        self.batch = batch

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Writes `[1, kv_heads, T, head_dim]` packed keys and values to their slots; returns the rows in use,
        `[rows, kv_heads, longest, head_dim]`."""
        device = key_states.device
        if self.offloaded:
            key_states, value_states = key_states.cpu(), value_states.cpu()
        while len(self.keys) <= layer_idx:
            self.keys.append(key_states.new_zeros(0))
            self.values.append(value_states.new_zeros(0))
            self.devices.append(device)
        keys = self._write(self.keys, key_states, layer_idx)
        values = self._write(self.values, value_states, layer_idx)
        return (keys.to(device), values.to(device)) if self.offloaded else (keys, values)

    def _write(self, stores: list[torch.Tensor], states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        batch, store = self.batch, stores[layer_idx]
        if store.numel() == 0 or store.shape[0] < batch.num_rows or store.shape[2] < batch.longest:
            store = stores[layer_idx] = _grown(store, batch.num_rows, batch.longest, states)
        if store.shape[0] > batch.num_rows:
            store = store[: batch.num_rows]
        used = store.narrow(2, 0, batch.longest)
        if batch.span is not None:  # several times faster than by index, which counts where a pass is short
            first, last = batch.span
            used.narrow(2, first, last - first).copy_(states)
        else:
            if batch.key_sources is not None:
                states = states.index_select(2, batch.key_sources.to(states.device))
            where = batch.key_rows.to(states.device), slice(None), batch.key_slots.to(states.device)
            used[where] = states[0].transpose(0, 1)
        return used

    def move_row(self, source: int, destination: int) -> None:
        """Overwrites one row with another, when a finished sequence leaves the batch."""
        for store in (*self.keys, *self.values):
            if store.numel():
                store[destination].copy_(store[source])

    def copy_beginning(self, source: int, destination: int, length: int) -> None:
        """Gives a row the first `length` slots of another, as far as the cache has that many."""
        for stores in (self.keys, self.values):
            for layer, store in enumerate(stores):
                if store.numel():
                    if store.shape[0] <= destination:
                        store = stores[layer] = _grown(store, destination + 1, store.shape[2], store)
                    store[destination, :, :length].copy_(store[source, :, :length])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.batch.longest if self.batch is not None and self.keys else 0

    def row(self, layer_idx: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values `[kv_heads, length, head_dim]` of one row; `None` for a layer that has none of its own."""
        if not self.keys[layer_idx].numel():
            return None
        stores = self.keys[layer_idx], self.values[layer_idx]
        return tuple(store[row, :, :length].to(self.devices[layer_idx]) for store in stores)


def _grown(store: torch.Tensor, rows: int, longest: int, like: torch.Tensor) -> torch.Tensor:
    """A copy with room for so many rows, and for rows that long. Zeros, not raw memory: a masked slot's value is
    multiplied by 0, which NaN would survive."""
    held_rows, slots = (store.shape[0], store.shape[2]) if store.numel() else (0, 0)
    if longest > slots:
        slots = max(64, longest + longest // 2)
    grown = like.new_zeros(max(rows, held_rows), like.shape[1], slots, like.shape[3])
    if store.numel():
        grown[:held_rows, :, : store.shape[2]] = store
    return grown
