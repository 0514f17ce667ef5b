"""The stages of a recipe in order: what each is made from, which are up to date, and running them.

Each stage writes one folder in `run_dir`: samples/, store/, checkpoint/, evaluation/, head/. `validate` writes its
record into store/. A stage is up to date if its folder is finished and was made from the same recipe and inputs.
"""

import os
from dataclasses import dataclass
from difflib import unified_diff
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from draftsmith.conversations.run import run_prepare
from draftsmith.conversations.sources import source_files
from draftsmith.errors import BadInput
from draftsmith.evaluate.run import RESULT, measured_acceptance, run_evaluate
from draftsmith.extract.run import run_extract
from draftsmith.files import hash_file, hash_json
from draftsmith.interop.data import Data
from draftsmith.interop.export import run_export
from draftsmith.interop.formats import open_data
from draftsmith.interop.source import Source, fingerprint
from draftsmith.interop.store_data import StoreData
from draftsmith.recipe import Recipe
from draftsmith.recipe import Source as RowSource
from draftsmith.store.manifest import (
    IDENTITY,
    MANIFEST,
    STORE_IDENTITY,
    StageFolder,
    content_hash,
    read_json,
    read_manifest,
)
from draftsmith.store.samples import CHAT_TEMPLATE
from draftsmith.store.validation import RECORD, read_record, require_passed, write_record
from draftsmith.train.run import run_train
from draftsmith.validate.run import Validation, run_validate
from draftsmith.verifier.facts import VerifierFacts, chat_template, read_facts
from draftsmith.verifier.locate import locate

StageName = Literal["prepare", "extract", "validate", "train", "evaluate", "export"]
STAGES: tuple[StageName, ...] = ("prepare", "extract", "validate", "train", "evaluate", "export")
FORMAT = 1


@dataclass(frozen=True)
class Outcome:
    """What a stage did: its folder, its result as plain JSON, and whether it was up to date already."""

    stage: StageName
    folder: Path
    result: dict[str, Any]
    up_to_date: bool
    passed: bool = True


@dataclass(frozen=True)
class Pipeline:
    """A recipe's stages. Nothing runs until `run` is called.

    `redo` says what happens to a folder that is there already: "never" refuses one made from something else,
    "stale" replaces it (and a damaged one), "always" replaces the up-to-date one too.
    """

    recipe: Recipe
    redo: Literal["never", "stale", "always"] = "never"

    @cached_property
    def facts(self) -> VerifierFacts:
        """The verifier's facts; the first use may convert or download it."""
        return read_facts(locate(self.recipe.verifier.model))

    @property
    def _run_dir(self) -> Path:
        return Path(self.recipe.run_dir)

    @property
    def samples(self) -> StageFolder:
        """samples/, made from the input files, the verifier and the recipe."""
        recipe = self.recipe.prepare
        settings = recipe.model_dump(mode="json", exclude={"input", "server_url", "server_requests"})
        inputs = {"sources": [_describe_source(source) for source in recipe.input]}
        return self._folder("samples", "prepare", settings, inputs, seed=self.recipe.seed)

    @property
    def store(self) -> StageFolder:
        """store/, made from the samples and the verifier."""
        inputs = {"samples": content_hash(self._run_dir / "samples")}
        not_content = {"vllm_url", "vllm_requests"}
        settings = self.recipe.extract.model_dump(mode="json", exclude=not_content)
        return self._folder("store", "extract", settings, inputs, identity_name=STORE_IDENTITY)

    @property
    def _data_path(self) -> Path:
        """Where the hidden states are: another tool's, or this run's own store."""
        return Path(self.recipe.data.path) if self.recipe.data.path else self._run_dir / "store"

    @cached_property
    def data(self) -> Data:
        """The hidden states to validate and to train on."""
        if not (self.recipe.data.path or (self._data_path / STORE_IDENTITY).is_file()):
            raise BadInput(f"{self._data_path}: not there. Run draftsmith extract first, or set data.path.")
        return open_data(self._data_path)

    @cached_property
    def _data_hash(self) -> str:
        return fingerprint(self.data)

    @property
    def _record(self) -> Path:
        return (self._data_path if isinstance(self.data, StoreData) else self._run_dir) / RECORD

    @property
    def stages(self) -> tuple[StageName, ...]:
        """The stages that this recipe has: with `data.path`, none that make a store."""
        return STAGES[2:] if self.recipe.data.path else STAGES

    def source(self) -> Source:
        """The hidden states as training reads them; raise DraftsmithError unless they passed validation."""
        record = read_record(self._record, self._data_hash)
        if not self.recipe.train.accept_unvalidated:
            require_passed(self._record, self._data_path, self._data_hash)
        boundaries = self.recipe.data.boundaries or self.data.layout.boundaries or (record or {}).get("boundaries")
        if not boundaries:
            raise BadInput(
                f"{self._data_path}: which layers its states are of is not known. Validate it at depth meaning, which "
                "finds out, or set data.boundaries."
            )
        return Source(self.data, boundaries, self.recipe.data.validation_share, self.recipe.seed)

    @property
    def checkpoint(self) -> StageFolder:
        """checkpoint/, made from the store."""
        inputs: dict[str, Any] = {"store": self._data_hash}
        if self.recipe.data.path:
            inputs["data"] = self.recipe.data.model_dump(mode="json", exclude={"path"})
        left_out = {"accept_unvalidated", "checkpoint_steps", "warm_start", "tensorboard"}
        settings = self.recipe.train.model_dump(mode="json", exclude=left_out)
        if self.recipe.train.warm_start:
            inputs["warm_start"] = _head_hash(Path(self.recipe.train.warm_start))
        return self._folder("checkpoint", "train", settings, inputs, seed=self.recipe.seed)

    @property
    def evaluation(self) -> StageFolder:
        """evaluation/, made from the checkpoint and the store's validation split."""
        recipe = self.recipe.evaluate
        measured = _head_hash(Path(recipe.head)) if recipe.head else content_hash(self._run_dir / "checkpoint")
        inputs = {"head" if recipe.head else "checkpoint": measured, "store": self._data_hash}
        return self._folder("evaluation", "evaluate", recipe.model_dump(mode="json", exclude={"head"}), inputs)

    @property
    def _draft_folder(self) -> Path:
        """The head that `evaluate` measures: the recipe's, or the last checkpoint's."""
        if self.recipe.evaluate.head:
            return Path(self.recipe.evaluate.head)
        checkpoint = self._run_dir / "checkpoint"
        return checkpoint / str(read_manifest(checkpoint)["counts"]["draft"])

    @property
    def head(self) -> StageFolder:
        """head/, made from the checkpoint; the evaluation gives the server's draft length."""
        inputs: dict[str, Any] = {"checkpoint": content_hash(self._run_dir / "checkpoint")}
        settings = {**self.recipe.export.model_dump(mode="json"), "fastest_draft_length": self._fastest()}
        return self._folder("head", "export", settings, inputs)

    def run(self, stage: StageName) -> Outcome:
        """Run one stage, unless it is up to date."""
        if stage not in self.stages:
            raise BadInput(f"data.path is set: this recipe takes {self._data_path} and has no stage {stage}")
        if stage == "validate":
            return self._validate()
        folder: StageFolder = getattr(self, _FOLDERS[stage])
        if self.redo == "always" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise BadInput(f"--redo does not go with several processes; delete {folder.path} first")
        if self.redo == "always" or (self.redo == "stale" and not folder.is_usable()):
            folder.remove()
        if folder.state() == "done":
            return Outcome(stage, folder.path, self._stored_result(stage, folder), up_to_date=True)
        return Outcome(stage, folder.path, self._make(stage, folder), up_to_date=False)

    def _make(self, stage: StageName, folder: StageFolder) -> dict[str, Any]:
        recipe, run_dir = self.recipe, self._run_dir
        made_from = {"extract": "samples", "evaluate": "checkpoint", "export": "checkpoint"}.get(stage)
        if made_from is not None and not (stage == "evaluate" and recipe.evaluate.head):
            self._check_verifier(run_dir / made_from)
        match stage:
            case "prepare":
                return run_prepare(folder, self.facts, recipe.prepare, recipe.verifier, recipe.seed)
            case "extract":
                return run_extract(folder, run_dir / "samples", self.facts, recipe.extract, recipe.verifier)
            case "train":
                return run_train(
                    folder, self.source(), self.facts, recipe.train, recipe.verifier, recipe.seed, measured_acceptance
                )
            case "evaluate":
                return run_evaluate(
                    folder,
                    self._draft_folder,
                    self.source(),
                    self.facts,
                    recipe.evaluate,
                    recipe.verifier,
                )
            case "export":
                return run_export(folder, run_dir / "checkpoint", self.facts, recipe.export, self._fastest())
            case "validate":
                raise AssertionError("validate writes no folder of its own")

    def _check_verifier(self, folder: Path) -> None:
        """Raise BadInput if a finished folder was made with another verifier; show how a chat template differs."""
        made_with: dict[str, str] = read_manifest(folder)["made_from"]["verifier"]
        differing = sorted(key for key, value in self.facts.identity.items() if made_with.get(key) != value)
        if not differing:
            return
        lines = []
        if "chat_template" in differing and (folder / CHAT_TEMPLATE).is_file():
            then = (folder / CHAT_TEMPLATE).read_text(encoding="utf-8").splitlines()
            now = chat_template(self.facts.folder).splitlines()
            lines = list(islice(unified_diff(then, now, "the template then", "the template now", "", "", 1, ""), 40))
        raise BadInput(
            f"{folder}: made with another {', '.join(differing)} than {self.facts.folder} has now. Make it again with "
            "--redo, or use the verifier that made it." + "".join(f"\n  {line}" for line in lines)
        )

    def _validate(self) -> Outcome:
        data, recipe = self.data, self.recipe.validate_
        record = read_record(self._record, self._data_hash) if self._is_whole() else None
        settings = recipe.model_dump(mode="json", exclude={"jobs"})
        if record is not None and self.redo != "always" and record["passed"] and record["settings"] == settings:
            return Outcome("validate", data.path, record, up_to_date=True)
        named = self.recipe.data.boundaries or None
        report = run_validate(Validation(data, self.facts, recipe, self.recipe.verifier, named))
        if self._is_whole():
            write_record(self._record, self._data_hash, report)
        return Outcome("validate", data.path, report, up_to_date=False, passed=report["passed"])

    def _is_whole(self) -> bool:
        """Say whether the data can have a record: a store that is unfinished has no hash."""
        return not isinstance(self.data, StoreData) or (self.data.path / MANIFEST).is_file()

    def _folder(
        self,
        name: str,
        stage: StageName,
        settings: dict[str, Any],
        inputs: dict[str, Any],
        identity_name: str = IDENTITY,
        seed: int | None = None,
    ) -> StageFolder:
        made_from = {"format": FORMAT, "stage": stage, stage: settings, "inputs": inputs}
        made_from["verifier"] = self.facts.identity
        if seed is not None:
            made_from["seed"] = seed
        return StageFolder(self._run_dir / name, identity_name, made_from)

    def _stored_result(self, stage: StageName, folder: StageFolder) -> dict[str, Any]:
        if stage == "evaluate":
            return read_json(folder.path / RESULT)
        counts: dict[str, Any] = read_manifest(folder.path)["counts"]
        return counts

    def _fastest(self) -> int | None:
        """The fastest draft length of this checkpoint's evaluation; None if it was not decoded for real."""
        result = self._run_dir / "evaluation" / RESULT
        if not result.is_file():
            return None
        made_from = read_manifest(result.parent)["made_from"]
        if made_from["inputs"].get("checkpoint") != content_hash(self._run_dir / "checkpoint"):
            return None
        real = read_json(result).get("real")
        return int(real["fastest_draft_length"]) if real else None


def _head_hash(folder: Path) -> str:
    """Return a hash of a head's config and weights; raise BadInput if it is none."""
    files = [folder / name for name in ("config.json", "model.safetensors", "pytorch_model.bin")]
    found = [file for file in files if file.is_file()]
    if len(found) < 2:
        raise BadInput(f"{folder}: not a head: wanted config.json and model.safetensors or pytorch_model.bin")
    return hash_json({file.name: hash_file(file) for file in found})


def _describe_source(source: RowSource) -> dict[str, Any]:
    """Return what identifies a source's rows: the hashes of its files, or its name, and what is taken of it."""
    files = source_files(source)
    settings = source.model_dump(mode="json", exclude={"path"})
    return {**settings, "files": [hash_file(file) for file in files] if files is not None else source.path}


_FOLDERS: dict[StageName, str] = {
    "prepare": "samples",
    "extract": "store",
    "train": "checkpoint",
    "evaluate": "evaluation",
    "export": "head",
}
