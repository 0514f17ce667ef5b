"""convert: every bit arrives, layer numbers are translated, what cannot be held is refused, a kill costs nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.errors import BadInput
from draftsmith.interop.convert import Conversion, run_convert
from draftsmith.interop.formats import open_data
from draftsmith.interop.source import read_states
from draftsmith.interop.store_data import StoreData
from draftsmith.interop.writers import Target
from draftsmith.verifier.facts import VerifierFacts, read_facts
from make_data import DataSample, make_arrow, make_specforge, make_store, make_v0, make_v1, random_samples

BOUNDARIES, LAYER_IDS = [2, 4, 5, 8], [1, 3, 4, 7]  # of the tiny verifier's 8 layers
LENGTHS = [5, 9, 1, 7]
TARGETS: list[Target] = ["draftsmith", "speculators-v1", "speculators"]
SMALL_SHARD = (64 << 10) + 12 * 4 * 64 * 2  # 12 tokens
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(scope="module")
def facts(tiny_verifier: Path) -> VerifierFacts:
    return read_facts(tiny_verifier)


def convert(source: Path, target: Path, to: Target, facts: VerifierFacts | None = None, **more: Any) -> dict[str, Any]:
    if to == "draftsmith":
        more.setdefault("shard_bytes", SMALL_SHARD)
    return run_convert(Conversion(open_data(source), target, to, facts=facts, **more))


def read_back(path: Path) -> list[DataSample]:
    """Read a folder of any format; states as the integers of their bits, so that NaN equals itself."""
    data, samples = open_data(path), []
    for number in range(len(data)):
        for sample in data.open(number).samples:
            with sample.content.open() as opened:
                tokens, mask = (torch.from_numpy(table.astype(np.int64)) for table in sample.read_tables(opened))
            samples.append((tokens, mask, read_states(sample)))
    return samples


def assert_same(found: list[DataSample], wanted: list[DataSample]) -> None:
    assert len(found) == len(wanted)
    for (ids, mask, states), (wanted_ids, wanted_mask, wanted_states) in zip(found, wanted, strict=True):
        assert torch.equal(ids, wanted_ids)
        assert torch.equal(mask, wanted_mask)
        assert [state.dtype for state in states] == [state.dtype for state in wanted_states]
        for state, wanted_state in zip(states, wanted_states, strict=True):
            integers = INTEGERS[state.dtype.itemsize]
            assert torch.equal(state.view(integers), wanted_state.view(integers))


def codes(path: Path) -> list[str]:
    """Return the codes of all that survey and headers show."""
    data = open_data(path)
    return [f.code for f in [*data.survey(), *(f for i in range(len(data)) for f in data.open(i).findings)]]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_way_round_keeps_every_bit(tmp_path: Path, facts: VerifierFacts) -> None:
    samples = random_samples(LENGTHS)
    source = make_v1(tmp_path / "v1", samples, LAYER_IDS)
    steps: list[tuple[Target, bool]] = [
        ("draftsmith", True), ("speculators-v1", False), ("speculators", False), ("speculators", False),
        ("draftsmith", True), ("speculators", False), ("speculators-v1", True), ("speculators-v1", False),
    ]  # fmt: skip
    for number, (to, with_verifier) in enumerate(steps):
        data = open_data(source)
        named = BOUNDARIES if data.layout.boundaries is None else None
        target = tmp_path / f"{number}-{to}"
        result = convert(source, target, to, facts if with_verifier else None, boundaries=named)
        assert (result["samples"], result["tokens"]) == (len(LENGTHS), sum(LENGTHS))
        assert result["supervised_tokens"] == sum(int(mask.sum()) for _, mask, _ in samples)
        assert_same(read_back(target), samples)
        assert codes(target) == (["DS124"] if to == "speculators" else [])
        assert open_data(target).layout.boundaries == (None if to == "speculators" else BOUNDARIES)
        source = target


def test_the_files_are_what_speculators_v1_writes(tmp_path: Path, facts: VerifierFacts) -> None:
    samples = random_samples(LENGTHS)
    store = make_store(tmp_path / "store", samples, BOUNDARIES, facts.identity)
    result = convert(store, tmp_path / "v1", "speculators-v1", facts, verifier_name="a/verifier")
    assert result["layer_ids"] == LAYER_IDS
    names = {path.name for path in (tmp_path / "v1").iterdir()}
    assert names == {"data_config.json", "sample_lengths.json", *(f"data_{i}.pt" for i in range(4))}
    for i, (ids, mask, states) in enumerate(samples):
        saved = torch.load(tmp_path / "v1" / f"data_{i}.pt", weights_only=True)
        assert list(saved) == ["input_ids", "hidden_states", "loss_mask"]
        assert isinstance(saved["hidden_states"], list)
        assert (saved["input_ids"].dtype, saved["loss_mask"].dtype) == (torch.int64, torch.int64)
        for tensor in (saved["input_ids"], saved["loss_mask"], *saved["hidden_states"]):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert_same([(saved["input_ids"], saved["loss_mask"], saved["hidden_states"])], [(ids, mask, states)])
    assert json.loads((tmp_path / "v1" / "sample_lengths.json").read_text()) == {"0": 5, "1": 9, "2": 1, "3": 7}
    config = json.loads((tmp_path / "v1" / "data_config.json").read_text())
    assert config["version"] == "2.0"
    assert config["model"] == {"target_model_path": "a/verifier", "hidden_size": 64}
    assert config["data"] == {"num_samples": 4}
    assert config["hidden_states"]["layer_ids"] == LAYER_IDS
    assert config["format"]["file_pattern"] == "data_{idx}.pt"
    assert "speculators_version" not in config


def test_the_dataset_is_what_the_datasets_library_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    samples = random_samples(LENGTHS * 100)  # more than a batch of rows
    source = make_v1(tmp_path / "v1", samples, LAYER_IDS)
    result = convert(source, tmp_path / "new", "speculators")
    assert result["dropped"] == {"layer numbers (kept as text in dataset_info.json)": 4}
    loaded = datasets.load_from_disk(str(tmp_path / "new"))
    integers = datasets.List(datasets.Value("int64"))
    assert loaded.features == {"input_ids": integers, "loss_mask": integers, "seq_len": datasets.Value("int64")}
    assert str(BOUNDARIES) in loaded.info.description
    for row, (ids, mask, states) in enumerate(samples):
        assert torch.equal(loaded[row]["input_ids"], ids)
        assert torch.equal(loaded[row]["loss_mask"], mask)
        assert int(loaded[row]["seq_len"]) == len(ids)
        saved = load_file(tmp_path / "new" / "hidden_states" / f"hs_{row}.safetensors")
        assert set(saved) == {"hidden_states", "token_ids"}
        assert saved["token_ids"].dtype == torch.int64
        assert torch.equal(saved["hidden_states"].view(torch.int16), torch.stack(states, dim=1).view(torch.int16))
    again = datasets.Dataset.from_dict(loaded.with_format(None).to_dict(), features=loaded.features)
    again.with_format("torch").save_to_disk(str(tmp_path / "again"))
    theirs, ours = (tmp_path / name / "state.json" for name in ("again", "new"))
    assert json.loads(theirs.read_text()).keys() == json.loads(ours.read_text()).keys()
    assert {path.name for path in (tmp_path / "again").iterdir()} == {
        path.name for path in (tmp_path / "new").iterdir() if path.name != "hidden_states"
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_floats_keep_their_bits_or_are_refused(tmp_path: Path, facts: VerifierFacts, dtype: torch.dtype) -> None:
    samples = random_samples([3, 4], dtype=dtype)
    source = make_v1(tmp_path / "v1", samples, LAYER_IDS)
    convert(source, tmp_path / "new", "speculators")
    convert(tmp_path / "new", tmp_path / "old", "speculators-v1", boundaries=BOUNDARIES)
    assert_same(read_back(tmp_path / "new"), samples)
    assert_same(read_back(tmp_path / "old"), samples)
    with pytest.raises(
        BadInput, match=r"holds BF16 only, .* never rounds. Instead, convert --to speculators-v1 or spec"
    ):
        convert(source, tmp_path / "store", "draftsmith", facts)
    assert not (tmp_path / "store").exists()


def test_numbers_begin_at_0_in_the_order_of_the_source(tmp_path: Path, facts: VerifierFacts) -> None:
    samples = random_samples([3, 4, 2])
    make_v1(tmp_path / "v1" / "rows_2000-4000", samples, numbers=[2003, 2010, 3999], lengths=False)
    torch.save({1: 2}, tmp_path / "v1" / "token_freq.pt")
    result = convert(tmp_path / "v1", tmp_path / "new", "speculators-v1", boundaries=BOUNDARIES)
    assert_same(read_back(tmp_path / "new"), samples)
    assert codes(tmp_path / "new") == []
    assert result["dropped"] == {"token_freq.pt": 1}
    assert any(warning.startswith("DS120") for warning in result["warnings"])
    convert(tmp_path / "v1", tmp_path / "store", "draftsmith", facts, boundaries=BOUNDARIES)
    ids = [sample.id for sample in open_data(tmp_path / "store").open(0).samples]
    assert ids[0] == "rows_2000-4000/data_2003.pt"


def test_a_store_keeps_its_splits_and_others_say_what_they_drop(tmp_path: Path, facts: VerifierFacts) -> None:
    samples = random_samples(LENGTHS)
    splits = ["train", "validation", "train", "validation"]
    store = make_store(tmp_path / "store", samples, BOUNDARIES, facts.identity, splits, SMALL_SHARD)
    result = convert(store, tmp_path / "copy", "draftsmith", facts)
    assert (result["splits"], result["dropped"]) == ({"train": 2, "validation": 2}, {})
    data = open_data(tmp_path / "copy")
    assert isinstance(data, StoreData)
    opened = [sample for i in range(len(data)) for sample in data.open(i).samples]
    assert {sample.id: sample.split for sample in opened} == {f"sample-{i}": split for i, split in enumerate(splits)}
    result = convert(store, tmp_path / "v1", "speculators-v1")
    assert result["dropped"] == {"sample names": 4, "marks of validation samples": 2, "hashes of the verifier": 3}
    assert_same(read_back(tmp_path / "v1"), [samples[i] for i in (0, 2, 1, 3)])


def test_a_dataset_says_which_rows_and_columns_are_dropped(tmp_path: Path, facts: VerifierFacts) -> None:
    samples = random_samples([3, 4, 2])
    source = make_arrow(tmp_path / "arrow", samples, {"messages": ["a", "b", "c"]})
    (source / "hidden_states" / "hs_1.safetensors").unlink()
    result = convert(source, tmp_path / "store", "draftsmith", facts, boundaries=BOUNDARIES)
    assert result["dropped"] == {"column messages": 1, "rows without states": 1}
    assert_same(read_back(tmp_path / "store"), [samples[0], samples[2]])


def damage_mask(folder: Path) -> None:
    ids, mask, states = random_samples([4], seed=1)[0]
    make_v1(folder, [(ids, mask + 1, states)], numbers=[1])


def damage_width(folder: Path) -> None:
    make_v1(folder, random_samples([9], width=32), numbers=[1], lengths=False)


def damage_planes(folder: Path) -> None:
    make_v1(folder, random_samples([9], planes=3), numbers=[1], lengths=False)


def damage_dtype(folder: Path) -> None:
    make_v1(folder, random_samples([9], dtype=torch.float16), numbers=[1], lengths=False)


def damage_tokens(folder: Path) -> None:
    ids, mask, states = random_samples([9])[0]
    make_v1(folder, [(ids - 300, mask, states)], numbers=[1], lengths=False)


def truncate(folder: Path) -> None:
    (folder / "data_1.pt").write_bytes((folder / "data_1.pt").read_bytes()[:-2000])


def contradict(folder: Path) -> None:
    (folder / "sample_lengths.json").write_text(json.dumps({str(i): 5 for i in range(4)}))


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (damage_mask, "DS205", "also [2]; wanted a loss mask of 0 and 1. Mend the mask."),
        (damage_width, "DS117", "a width of 32; wanted a width of 64"),
        (damage_planes, "DS115", "3 states; wanted 4 states"),
        (damage_dtype, "DS119", "states in F16; wanted states in BF16"),
        (damage_tokens, "DS204", "token ids from 0"),
        (truncate, "DS10", "data_1.pt"),
        (contradict, "DS118", "the 5 of sample_lengths.json"),
    ],
)
@pytest.mark.parametrize("to", TARGETS)
def test_a_source_with_errors_is_not_converted(
    tmp_path: Path, facts: VerifierFacts, to: Target, damage: Callable[[Path], None], code: str, words: str
) -> None:
    source = make_v1(tmp_path / "v1", random_samples(LENGTHS), LAYER_IDS)
    damage(source)
    with pytest.raises(BadInput, match="nothing was converted") as caught:
        convert(source, tmp_path / "new", to, facts)
    assert caught.value.exit_code == 2
    assert code in str(caught.value)
    assert words in str(caught.value)
    assert f"draftsmith validate {source}" in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("to", TARGETS)
def test_a_last_state_after_the_norm_is_refused(tmp_path: Path, facts: VerifierFacts, to: Target) -> None:
    samples = random_samples([3])
    for source in (
        make_v0(tmp_path / "v0", samples),
        make_specforge(tmp_path / "forge", samples),
        make_specforge(tmp_path / "packed", samples, gz=True),
    ):
        with pytest.raises(BadInput, match=r"after the final norm.* cannot be undone exactly"):
            convert(source, tmp_path / "new", to, facts, boundaries=BOUNDARIES)


def test_what_nobody_knows_is_not_guessed(tmp_path: Path, facts: VerifierFacts) -> None:
    samples = random_samples([3])
    unknown = make_v1(tmp_path / "unknown" / "v1", samples)
    for to in ("draftsmith", "speculators-v1"):
        with pytest.raises(BadInput, match=r"nothing says which layers .* --boundaries 2,15,27,30"):
            convert(unknown, tmp_path / "new", to, facts)
    assert convert(unknown, tmp_path / "dataset", "speculators")["boundaries"] is None
    known = make_v1(tmp_path / "v1", samples, LAYER_IDS)
    with pytest.raises(BadInput, match="holds the hashes of its verifier: name it with --verifier"):
        convert(known, tmp_path / "new", "draftsmith")
    with pytest.raises(BadInput, match=r"data_config.json says .* \[2, 4, 5, 8\], --boundaries says \[2, 4, 6, 8\]"):
        convert(known, tmp_path / "new", "speculators", boundaries=[2, 4, 6, 8])
    for wrong in ([2, 4, 8], [4, 2, 5, 8], [-1, 2, 5, 8], []):
        with pytest.raises(BadInput, match="boundaries"):
            convert(unknown, tmp_path / "new", "speculators", boundaries=wrong)
    with pytest.raises(BadInput, match=r"boundary 0.* has no layer id"):
        convert(unknown, tmp_path / "new", "speculators-v1", boundaries=[0, 4, 5, 8])
    assert not (tmp_path / "new").exists()


def test_a_verifier_that_did_not_make_the_states_is_refused(tmp_path: Path, facts: VerifierFacts) -> None:
    samples = random_samples([3])
    deeper = make_v1(tmp_path / "deeper", samples, [1, 3, 4, 9])
    with pytest.raises(BadInput, match=r"the last of its boundaries \[2, 4, 5, 10\] is not 8"):
        convert(deeper, tmp_path / "new", "draftsmith", facts)
    wider = make_v1(tmp_path / "wider", random_samples([3], width=32), LAYER_IDS)
    with pytest.raises(BadInput, match=r"32 wide, those of the verifier .* 64"):
        convert(wider, tmp_path / "new", "draftsmith", facts)
    lying = make_v1(tmp_path / "lying", samples, LAYER_IDS, model={"hidden_size": 128})
    with pytest.raises(BadInput, match="64 wide, but a file beside them says 128"):
        convert(lying, tmp_path / "new", "speculators-v1")
    other = make_store(tmp_path / "other", samples, BOUNDARIES, {**facts.identity, "tokenizer": "another"})
    with pytest.raises(BadInput, match=r"made with another verifier .*: another tokenizer"):
        convert(other, tmp_path / "new", "speculators-v1", facts)


def test_fp8_is_refused_everywhere(tmp_path: Path, facts: VerifierFacts) -> None:
    samples = random_samples([3])
    source = make_arrow(tmp_path / "arrow", samples)
    fp8 = torch.zeros(3, 4, 64).to(torch.float8_e4m3fn)
    tensors = {"hidden_states": fp8, "token_ids": samples[0][0], "hidden_states_scales": torch.ones(3, 1, 1)}
    save_file(tensors, source / "hidden_states" / "hs_0.safetensors")
    for to in TARGETS:
        with pytest.raises(BadInput, match=r"states are F8_E4M3; .* never rounds. Instead, train on the files"):
            convert(source, tmp_path / "new", to, facts, boundaries=BOUNDARIES)


def test_states_of_other_tokens_are_refused(tmp_path: Path) -> None:
    samples = random_samples([3, 3])
    source = make_arrow(tmp_path / "arrow", samples)
    shutil.copy(source / "hidden_states" / "hs_0.safetensors", source / "hidden_states" / "hs_1.safetensors")
    with pytest.raises(BadInput, match="DS219"):
        convert(source, tmp_path / "new", "speculators")


@pytest.mark.parametrize("mask", [[[0.5, 1.0, 0.0]], [[1, None, 0]], [["a", "b", "c"]]])
def test_masks_that_are_no_integers_are_refused(tmp_path: Path, mask: list[list[Any]]) -> None:
    (sample,) = samples = random_samples([3])
    source = make_arrow(tmp_path / "arrow", samples)
    table = pa.table({"input_ids": pa.array([sample[0].tolist()]), "loss_mask": pa.array(mask)})
    path = str(source / "data-00000-of-00001.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    with pytest.raises(BadInput, match=r"DS114|wanted lists of integers"):
        convert(source, tmp_path / "new", "speculators")


@pytest.mark.parametrize("to", TARGETS)
def test_a_flipped_bit_is_not_copied(tmp_path: Path, facts: VerifierFacts, to: Target) -> None:
    source = make_v1(tmp_path / "v1", random_samples([40]), LAYER_IDS)
    span = open_data(source).open(0).samples[0].states[2]
    file = bytearray((source / "data_0.pt").read_bytes())
    file[span.offset + 77] ^= 4
    (source / "data_0.pt").write_bytes(file)
    with pytest.raises(BadInput, match="DS215"):
        convert(source, tmp_path / "new", to, facts)
    assert not (tmp_path / "new" / "manifest.json").exists()
    assert not (tmp_path / "new" / "data_config.json").exists()
    assert not (tmp_path / "new" / "state.json").exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("to", TARGETS)
def test_killed_before_any_rename_it_goes_on_to_the_same_bytes(
    tmp_path: Path, facts: VerifierFacts, to: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th file to get its final name does not get it: what is left is what a kill there would leave."""
    source = make_v1(tmp_path / "v1", random_samples(LENGTHS), LAYER_IDS)
    convert(source, tmp_path / "undisturbed", to, facts)
    wanted = content(tmp_path / "undisturbed")
    rename, count = Path.rename, 0
    for kill_at in range(1, 100):
        count = 0

        def killed(path: Path, target: Path, at: int = kill_at) -> Path:
            nonlocal count
            count += 1
            if count == at:
                raise Killed
            return rename(path, target)

        target = tmp_path / f"killed-{kill_at}"
        monkeypatch.setattr(Path, "rename", killed)
        try:
            convert(source, target, to, facts)
        except Killed:
            monkeypatch.setattr(Path, "rename", rename)
            assert list(target.rglob("*.tmp"))
            for partial in target.rglob("*.safetensors.tmp"):
                shutil.copy(partial, partial.with_name(".tmpQ1w2E3"))  # safetensors' own temporary name
            written = {p: p.stat().st_mtime_ns for p in target.rglob("*") if p.suffix in (".pt", ".safetensors")}
            convert(source, target, to, facts)
            assert {p: p.stat().st_mtime_ns for p in written} == written  # finished files are not written again
            assert content(target) == wanted
        else:
            break
    monkeypatch.setattr(Path, "rename", rename)
    assert kill_at == count + 1
    assert count > len(LENGTHS)


@pytest.mark.parametrize("to", ["speculators-v1", "speculators"])
def test_killed_before_the_last_step_it_goes_on(tmp_path: Path, to: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_v1(tmp_path / "v1", random_samples(LENGTHS), LAYER_IDS)
    convert(source, tmp_path / "undisturbed", to)

    def killed(path: Path) -> None:
        raise Killed(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(Killed):
            convert(source, tmp_path / "new", to)
    assert (tmp_path / "new" / "convert.json").is_file()
    convert(source, tmp_path / "new", to)
    assert content(tmp_path / "new") == content(tmp_path / "undisturbed")


@pytest.mark.parametrize("to", TARGETS)
def test_a_target_that_is_something_else_is_left_alone(tmp_path: Path, facts: VerifierFacts, to: Target) -> None:
    source = make_v1(tmp_path / "v1", random_samples(LENGTHS), LAYER_IDS)
    target = tmp_path / "new"
    convert(source, target, to, facts)
    before = content(target)
    with pytest.raises(BadInput, match=r"finished|not empty"):
        convert(source, target, to, facts)
    unfinished = tmp_path / "unfinished"
    shutil.copytree(target, unfinished)
    for name in ("manifest.json", "data_config.json", "state.json"):
        (unfinished / name).unlink(missing_ok=True)
    if to != "draftsmith":
        (unfinished / "convert.json").write_text(json.dumps({"made_from": {"inputs": {"fingerprint": "another"}}}))
    make_v1(source, random_samples(LENGTHS, seed=5), LAYER_IDS)
    with pytest.raises(BadInput, match="begun from another source, from one that has changed"):
        convert(source, unfinished, to, facts)
    assert content(target) == before
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    for wrong, words in (
        (source / "in", "lies in the source"),
        (source, "lies in the source"),
        (tmp_path / "file", "a file of this name"),
        (tmp_path / "full", "not empty, and no unfinished conversion"),
    ):
        with pytest.raises(BadInput, match=words):
            convert(source, wrong, to, facts)


def test_the_command_line(tmp_path: Path, tiny_verifier: Path, run_cli: Callable[..., tuple[int, str, str]]) -> None:
    def convert_cli(*arguments: str | Path) -> tuple[int, str, str]:
        return run_cli("convert", *arguments)

    source = make_v1(tmp_path / "a" / "v1", random_samples(LENGTHS))
    code, out, err = convert_cli(source, tmp_path / "store", "--to", "draftsmith", "--verifier", tiny_verifier)
    assert (code, out) == (2, "")
    assert "nothing says which layers" in err
    assert "Traceback" not in err
    named = ("--boundaries", "2,4,5,8")
    code, out, _ = convert_cli(source, tmp_path / "store", "--to", "draftsmith", "--verifier", tiny_verifier, *named)
    assert code == 0
    assert "4 samples, 22 tokens" in out
    code, out, _ = convert_cli(tmp_path / "store", tmp_path / "old", "--to", "speculators-v1", "--json")
    assert code == 0
    assert json.loads(out)["layer_ids"] == LAYER_IDS
    assert convert_cli(source, tmp_path / "new", "--to", "speculators", "--boundaries", "two")[0] == 2
    assert convert_cli(source, tmp_path / "new", "--to", "specforge")[0] == 2
    assert convert_cli(tmp_path / "nothing", tmp_path / "new", "--to", "speculators")[0] == 2
