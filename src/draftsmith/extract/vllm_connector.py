"""vLLM's hidden-state connector with a plain copy, for CPUs: its own needs pinned memory and CUDA streams.

Imported by vLLM (`kv_connector_module_path`), in vLLM's environment; nothing of draftsmith imports it.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Done:
    """An event that is over."""

    def query(self) -> bool:
        return True


class PlainCopyConnector(ExampleHiddenStatesConnector):
    """Writes a request's states as soon as it has finished, in the worker's own thread."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + offsets).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0])
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        self._req_copy_events[pending.req_id] = _Done()
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)  # lets the reader in
