"""The planted faults: each one small mutation of clean real data, and the code, place and words it is found under."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import mutations as m

V1, V0, SF, GZ, ARROW = "speculators-v1", "speculators-v0", "specforge", "specforge-gz", "speculators"
FILE, CONFIG, LAST = f"data_{m.VICTIM}.", "data_config.json", "last state"
DEPTHS = {"1": "structure", "2": "values", "3": "meaning"}


class Fault(NamedTuple):
    """One planted fault. `where` and `found` stand in the finding; `others` are codes that it may raise besides."""

    kind: str
    code: str
    apply: Callable[[Path], None]
    found: str = ""
    where: str = FILE
    format: str = V1
    others: tuple[str, ...] = ()

    @property
    def depth(self) -> str:
        """How deep to look for it (the length of a sample is compared at depth values)."""
        return "values" if self.code == "DS127" else DEPTHS[self.code[2]]


FAULTS = [
    Fault("cut off at the end", "DS108", m.in_bytes(lambda data: bytes(data[:-1000])), "truncated"),
    Fault("an empty file", "DS108", m.in_bytes(lambda _: b""), "empty"),
    Fault("a text file by that name", "DS107", m.in_bytes(lambda _: b"not found\n" * 99)),
    Fault("a pickle of before torch 1.6", "DS107", m.legacy, "bare pickle"),
    Fault("a record overwritten", "DS109", m.in_bytes(m.overwrite_record)),
    Fault("a pickle that runs a command", "DS110", m.in_file(m.attack), "system"),
    Fault("a zip bomb", "DS111", m.in_bytes(m.deflate)),
    Fault("a gzip bomb", "DS111", m.gzip_bomb, format=GZ),
    Fault("gzip cut off", "DS108", m.in_bytes(lambda data: bytes(data[: len(data) // 2])), format=GZ),
    Fault("not gzip", "DS107", m.in_bytes(lambda data: b"PK" + bytes(data[2:])), format=GZ),
    Fault("no loss_mask", "DS112", m.in_file(m.drop("loss_mask")), "input_ids, hidden_states"),
    Fault("no aux states", "DS112", m.in_file(m.drop("aux_hidden_state")), format=SF),
    Fault("a key too many", "DS113", m.in_file(lambda content: content.update(extra=torch.zeros(2))), "extra"),
    Fault("one tensor for the list", "DS114", m.in_file(m.put("hidden_states", torch.stack))),
    Fault("tokens as floats", "DS114", m.in_file(m.put("input_ids", torch.Tensor.float)), "F32"),
    Fault("transposed states", "DS114", m.in_file(m.put("hidden_states", m.transposed)), "strides"),
    Fault("a layer missing", "DS115", m.in_file(m.states(lambda planes: planes[:3])), "3"),
    Fault("a config of three layers", "DS115", m.in_config("hidden_states", layer_ids=[1, 14, 29]), "4", CONFIG),
    Fault("too few rows of states", "DS116", m.in_file(m.states(lambda planes: [p[:-16] for p in planes]))),
    Fault("a mask one token short", "DS116", m.in_file(m.put("loss_mask", lambda mask: mask[:-1].clone()))),
    Fault("states of another width", "DS117", m.in_file(m.states(lambda planes: [p[:, :512] for p in planes])), "512"),
    Fault("another length than listed", "DS118", m.lengths),
    Fault("float16 among bfloat16", "DS119", m.in_file(m.states(lambda planes: [p.half() for p in planes])), "F16"),
    Fault("one layer in float32", "DS119", m.in_file(m.last(torch.Tensor.float)), "F32"),
    Fault("a hole in the numbering", "DS120", m.hole, "1 have no file: 3", ""),
    Fault("a row without states", "DS120", m.remove("hidden_states/hs_3.safetensors"), "3", "", ARROW),
    Fault("a number twice", "DS121", m.duplicate, f"rows_0-2000/data_{m.VICTIM}.pt", others=("DS125",)),
    Fault("in the folder of other numbers", "DS122", m.misplace),
    Fault("a temporary file left", "DS123", lambda folder: (folder / "data_9.pt.tmp").touch(), where="data_9.pt.tmp"),
    Fault("token_freq.pt among the data", "DS106", m.token_freq, where="token_freq.pt"),
    Fault("no data_config.json", "DS124", m.remove(CONFIG), where=""),
    Fault("a config of another width", "DS125", m.in_config("model", hidden_size=960), "960", CONFIG),
    Fault("a config of more samples", "DS125", m.in_config("data", num_samples=99), "99", CONFIG),
    Fault("layers in another order", "DS125", m.in_config("hidden_states", layer_ids=[14, 1, 26, 29]), "14, 1", CONFIG),
    Fault("an empty sample", "DS126", m.in_file(m.cut(0)), others=("DS118",)),
    Fault("longer than seq_length", "DS127", m.in_config("data", seq_length=64), where="data_"),
    Fault("views saved with their storage", "DS128", m.in_file(m.put("hidden_states", m.views))),
    Fault("sample_lengths.json cut off", "DS129", m.cut_lengths, "JSON", "sample_lengths.json"),
    Fault("d2t as ids, not offsets", "DS129", m.vocabulary, "not the same", "d2t.npy"),
    Fault("states beyond the rows", "DS130", m.beyond_rows, "99", "hs_99", ARROW),
    Fault("NaN", "DS202", m.in_file(m.row(2, 7, float("nan"))), "first 7"),
    Fault("NaN in an Arrow dataset", "DS202", m.in_arrow(m.item("hidden_states", (5, 1), float("nan"))), "first 5",
          "hs_3", ARROW),
    Fault("Inf", "DS208", m.in_file(m.row(0, 7, float("inf"))), "first 7"),
    Fault("a row of zeros", "DS203", m.in_file(m.row(1, 11, 0.0)), "first 11"),
    Fault("a row of one value", "DS209", m.in_file(m.row(1, 11, 1.5)), "first 11"),
    Fault("a layer of zeros", "DS210", m.in_file(m.states(lambda p: [p[0], torch.zeros_like(p[1]), *p[2:]])), "zeros"),
    Fault("a token beyond the vocabulary", "DS204", m.in_file(m.item("input_ids", 4, 49152)), "49152"),
    Fault("a negative token", "DS204", m.in_file(m.item("input_ids", 4, -100)), "-100"),
    Fault("a mask of 2", "DS205", m.in_file(m.item("loss_mask", 4, 2)), "2"),
    Fault("a mask of zeros", "DS206", m.in_file(m.put("loss_mask", torch.zeros_like))),
    Fault("a mask of ones", "DS211", m.in_file(m.put("loss_mask", torch.ones_like))),
    Fault("padding saved as data", "DS212", m.in_file(m.pad), "last 9", others=("DS118",)),
    Fault("one layer twice", "DS207", m.in_file(m.states(lambda p: [p[0], p[0], *p[2:]])), "hidden_states[1]"),
    Fault("one layer a thousandfold", "DS213", m.in_file(m.states(m.thousandfold)), "times", "state 1"),
    Fault("all states of another sample", "DS214", m.whole_of_another, "data_", "data_"),
    Fault("a bit flipped in the states", "DS215", m.in_bytes(m.flip(0.4)), where="hidden_states"),
    Fault("a bit flipped in the tokens", "DS215", m.in_bytes(m.flip_token), where="tokens"),
    Fault("the same conversation twice", "DS217", m.same_conversation, FILE, f"data_{m.VICTIM + 1}"),
    Fault("rows of a stale buffer", "DS218", m.in_file(m.stale_rows), "4 rows, first 10"),
    Fault("states of another row's tokens", "DS219", m.in_arrow(m.item("token_ids", 6, 77)), "77", "hs_3", ARROW),
    Fault("states one row too late", "DS304", m.in_all(m.last(lambda state: state.roll(1, 0))), "too late", LAST),
    Fault("states one row too early", "DS304", m.in_all(m.last(lambda state: state.roll(-1, 0))), "too early", LAST),
    Fault("last states normed already", "DS305", m.norm_again, "already", LAST, others=("DS312",)),
    Fault("targets not normed", "DS306", m.not_normed, "not applied", LAST, V0, ("DS312",)),
    Fault("the list reversed", "DS307", m.in_all(m.states(lambda planes: planes[::-1])), "hidden_states[0]", LAST,
          others=("DS310",)),
    Fault("an aux state in last place", "DS307", m.in_all(m.swap(2, 3)), "hidden_states[2]", LAST, others=("DS310",)),
    Fault("each file with the next one's states", "DS308", m.rotate_files(1), "next", LAST),
    Fault("each file with the states before", "DS308", m.rotate_files(-1), "before", LAST),
    Fault("norm of the other family", "DS309", m.other_family, "other family", LAST, V0, ("DS312",)),
    Fault("another model of the same size", "DS301", m.in_all(m.states(m.permuted)), "another verifier", LAST),
    Fault("one sample's states from elsewhere", "DS303", m.anothers(3), "tokens predicted", others=("DS316",)),
    Fault("layers one off", "DS310", m.in_config("hidden_states", layer_ids=[1, 15, 26, 29]), "boundary 15",
          "hidden_states[1]"),
    Fault("aux states in another order", "DS310", m.in_all(m.swap(0, 1)), "boundary 15", "hidden_states[0]"),
    Fault("one layer of another model", "DS312", m.in_all(m.states(m.one_permuted)), "differs", "hidden_states[1]"),
    Fault("an aux layer of another request", "DS316", m.anothers(1, 1), "relative", "hidden_states[1]"),
    Fault("a mask one token late", "DS313", m.in_file(m.put("loss_mask", lambda mask: mask.roll(1))), "late"),
    Fault("a mask one token early", "DS313", m.in_file(m.put("loss_mask", lambda mask: mask.roll(-1))), "early"),
    Fault("the mask of another sample", "DS314", m.anothers_mask, "not the span"),
    Fault("answers of another model", "DS302", m.in_all(m.other_answers), "not written", LAST),
    Fault("masks of another template", "DS317", m.in_all(m.supervise_questions), where="loss masks",
          others=("DS301", "DS302")),
]  # fmt: skip
