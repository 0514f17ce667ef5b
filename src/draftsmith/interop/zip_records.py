"""The records of a `torch.save` zip: where they lie, and the few small ones that are not tensors.

    name/data.pkl    the pickle, with references to storages
    name/byteorder   "little"
    name/data/0      the bytes of storage "0", and so on
    ...
    directory        the records' names, sizes and places

Read are the directory, `data.pkl`, `byteorder`, and the 30-byte header in front of each record asked for.
"""

import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, cast

from draftsmith.store.findings import DamagedFile
from draftsmith.store.sample_file import Record

MAX_PICKLE_BYTES = 64 << 20
MAX_DIRECTORY_BYTES = 16 << 20
DAMAGED = "The file is damaged or was made to do harm; write it again from its source."
# In front of each record: magic, ..., lengths of its name and its extra field; then these; then the content.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_RECORD_MAGIC = b"PK\x03\x04"
_OTHER_MAGIC = {
    b"\x80": "a bare pickle, as torch.save wrote before torch 1.6; load it with "
    "torch.load(weights_only=True) and save it again",
    b"\x1f\x8b": "gzip; unpack it first",
}


class Archive:
    """The zip around a pickle: finds records, reads what is not tensors."""

    def __init__(self, file: IO[bytes], path: Path, file_bytes: int) -> None:
        """Read the directory; raise DamagedFile if there is none."""
        self.path, self._file = path, file
        file.seek(0)
        magic = file.read(len(_RECORD_MAGIC))
        if magic != _RECORD_MAGIC:
            found = [what for start, what in _OTHER_MAGIC.items() if magic.startswith(start)]
            raise DamagedFile(
                "DS107" if magic else "DS108",
                f"{path}: wanted a torch.save file (a zip, torch 1.6 or later), found "
                + (found[0] if found else "something else" if magic else "an empty file; write it again"),
            )
        try:
            with zipfile.ZipFile(cast(IO[bytes], _Limited(file, file_bytes))) as archive:
                infos = archive.infolist()
                self._directory_start = archive.start_dir
        except Exception as error:  # whatever bytes at random can make of a directory
            raise DamagedFile(
                "DS108",
                f"{path}: truncated: {file_bytes:,} bytes that begin like a zip, but the zip's directory, "
                f"which belongs at the end, cannot be read ({error!a}). Write or copy the file again.",
            ) from error
        self._infos = {info.filename: info for info in infos}
        pickles = [name for name in self._infos if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1 or len(self._infos) != len(infos):
            raise DamagedFile(
                "DS109",
                f"{path}: a zip, but not of torch.save: wanted one NAME/data.pkl and no name twice, found "
                f"{len(infos)} records, {len(pickles)} of them data.pkl.",
            )
        self._name = pickles[0].removesuffix("/data.pkl")

    def pickle_bytes(self) -> bytes:
        """Return data.pkl; raise DamagedFile if it is too large, changed, or for a big-endian machine."""
        order = self._infos.get(f"{self._name}/byteorder")
        if order is not None and self._read(order, 16) != b"little":
            raise DamagedFile("DS109", f"{self.path}: wanted little-endian tensors. Save it again on such a machine.")
        info = self._infos[f"{self._name}/data.pkl"]
        data = self._read(info, MAX_PICKLE_BYTES)
        if info.CRC and zlib.crc32(data) != info.CRC:  # 0: torch was told not to compute it
            raise DamagedFile("DS215", f"{self.path}: data.pkl does not have the CRC-32 it was written with. {DAMAGED}")
        return data

    def storage(self, key: str, wanted_bytes: int) -> Record:
        """Return where storage `key` is; raise DamagedFile unless it holds `wanted_bytes`."""
        info = self._infos.get(f"{self._name}/data/{key}")
        if info is None or info.file_size < wanted_bytes:
            found = "missing" if info is None else f"{info.file_size:,} bytes long"
            raise DamagedFile(
                "DS109", f"{self.path}: storage {key!a} is {found}, wanted {wanted_bytes:,} bytes. {DAMAGED}"
            )
        return Record(self._start(info), info.file_size, info.CRC)

    def _read(self, info: zipfile.ZipInfo, limit: int) -> bytes:
        if info.file_size > limit:
            raise DamagedFile(
                "DS111",
                f"{self.path}: {info.filename!a} has {info.file_size:,} bytes, wanted at most {limit:,}. {DAMAGED}",
            )
        self._file.seek(self._start(info))
        return self._file.read(info.file_size)

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Return the first byte of a record's content, which must lie in the file as it is."""
        stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if not stored or info.flag_bits & 1:
            raise DamagedFile(
                "DS111",
                f"{self.path}: {info.filename!a} is compressed or encrypted, which torch.save never does: "
                f"{info.compress_size:,} bytes that say to become {info.file_size:,}. If you trust who wrote it, "
                "unpack the zip and save its content with torch.save.",
            )
        self._file.seek(max(0, info.header_offset))
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) == _LOCAL_HEADER.size:
            magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            start = info.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)
            if magic == _RECORD_MAGIC and start + info.file_size <= self._directory_start:
                return start
        raise DamagedFile("DS109", f"{self.path}: {info.filename!a} is not where the zip's directory says. {DAMAGED}")


class _Limited:
    """A file of which a limited number of bytes can be read."""

    def __init__(self, file: IO[bytes], file_bytes: int) -> None:
        self._file, self._file_bytes, self._left = file, file_bytes, MAX_DIRECTORY_BYTES
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes, or up to the end."""
        rest = max(0, self._file_bytes - self.tell())
        wanted = rest if size < 0 else min(size, rest)
        self._left -= wanted
        if self._left < 0:
            raise ValueError(f"more than {MAX_DIRECTORY_BYTES:,} bytes of directory")
        return self._file.read(wanted)
