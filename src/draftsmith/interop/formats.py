"""Which format a path holds, told from its content."""

from pathlib import Path

from draftsmith.errors import BadInput
from draftsmith.interop.arrow_data import ArrowData
from draftsmith.interop.data import Data
from draftsmith.interop.store_data import StoreData
from draftsmith.interop.torch_data import TorchData
from draftsmith.store.manifest import MANIFEST, STORE_IDENTITY


def whole_data(path: Path) -> Data | None:
    """Open a folder of hidden states, if it is one and (a store of ours) finished; else None."""
    if not path.is_dir():
        return None
    if (path / STORE_IDENTITY).is_file():
        return StoreData.recognise(path) if (path / MANIFEST).is_file() else None
    return ArrowData.recognise(path) or TorchData.recognise(path)


def open_data(path: Path) -> Data:
    """Open hidden states of any known format; raise BadInput if there are none."""
    if not path.exists():
        raise BadInput(f"{path}: no such file or folder")
    for kind in (StoreData, ArrowData, TorchData):
        data = kind.recognise(path)
        if data is not None:
            return data
    raise BadInput(
        f"{path}: no hidden states that draftsmith knows; looked for store.json (draftsmith), data_<number>.pt or "
        "rows_<a>-<b>/data_<number>.pt (speculators v1), data_<number>.ckpt[.gz] (SpecForge, speculators v0), and an "
        "Arrow dataset with hidden_states/hs_<row>.safetensors (speculators 0.5+)"
    )
