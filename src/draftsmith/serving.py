"""The exported head in vLLM, beside the same head here: what `draftsmith evaluate --server vllm` does for a recipe.

The reference is the checkpoint as training measured it; what is served is the exported head. Where the two part, a look
into head, server and prompts says why, before any figure does.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.conversations.sources import RowReport, read_rows
from draftsmith.conversations.template import ChatTemplate, Refused
from draftsmith.draft.checkpoint import load_draft, read_tensors
from draftsmith.draft.config import DraftConfig
from draftsmith.errors import BadInput, DraftsmithError
from draftsmith.evaluate.agreement import DTYPE, TEMPLATE, WEIGHTS, Suspect
from draftsmith.evaluate.replay import NORMS, NUMBERING, VOCABULARY
from draftsmith.evaluate.run import held_out_prompts
from draftsmith.evaluate.server import (
    SPECULATIVE,
    PromptSet,
    Urls,
    read_counts,
    rendered_by_server,
    serve_set,
    servers,
    warm_up,
)
from draftsmith.evaluate.server_page import server_page
from draftsmith.evaluate.three_ways import Reference, compare_set
from draftsmith.extract.run import VLLM_LOG
from draftsmith.files import write_json, write_text
from draftsmith.pipeline import Pipeline
from draftsmith.recipe import Source as RowSource
from draftsmith.store.manifest import MANIFEST, content_hash, read_json, read_manifest
from draftsmith.store.samples import CHAT_TEMPLATE
from draftsmith.validate.head import validate_head
from draftsmith.verifier.facts import VerifierFacts, chat_template
from draftsmith.verifier.head import read_head
from draftsmith.verifier.run import choose_dtype, load_verifier
from draftsmith.verifier.tokens import end_of_turn_ids, load_tokenizer
from draftsmith.verifier.vllm_server import VllmServer, served_dtype

HELD_OUT = "held-out prompts"
FOLDER, RESULT, PAGE = "served", "vllm.json", "vllm.html"
_CAUSES = (NUMBERING, NORMS, VOCABULARY, TEMPLATE, WEIGHTS, DTYPE)  # in the order in which they are named
_NORM_KEYS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_PROBE = [{"role": "user", "content": "Where does the Rhine begin?"}]
Messages = list[dict[str, Any]]


def evaluate_on_vllm(pipeline: Pipeline, prompt_files: list[Path], urls: Urls) -> dict[str, Any]:
    """Measure the exported head in vLLM on the held-out prompts, or on files of rows; write and return the figures."""
    recipe = pipeline.recipe
    served = ServedHead(pipeline)
    prompts = Prompts(pipeline, prompt_files)
    longest = max(len(ids) for part in prompts.sets.values() for _, ids in part) + recipe.evaluate.max_new_tokens
    log = Path(recipe.run_dir) / VLLM_LOG
    suspects = served.suspects
    with servers(served.path, served.draft_length, longest, pipeline.facts, recipe.verifier, urls, log) as found:
        length = len(read_counts(found[SPECULATIVE]).accepted) if urls.speculative else 0
        reference = _reference(pipeline, served, length or served.draft_length)
        suspects += prompts.suspects(found[SPECULATIVE])
        suspects.sort(key=lambda suspect: _CAUSES.index(suspect.cause))
        warm_up(found, next(iter(prompts.sets.values()))[0][1])
        answered = {
            name: serve_set(name, part, found, recipe.evaluate.max_new_tokens) for name, part in prompts.sets.items()
        }
    sets = [compare_set(name, prompts.sets[name], answers, reference, suspects) for name, answers in answered.items()]
    result: dict[str, Any] = {
        "head": str(served.path),
        "measured_against": str(served.trained or served.path),
        "draft_length": reference.draft_length,
        "max_new_tokens": recipe.evaluate.max_new_tokens,
        "dtype": reference.served_dtype,
        "template_checked": prompts.checked,
        "sets": sets,
    }
    folder = Path(recipe.run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULT, result)
    write_text(folder / PAGE, server_page(result))
    return result


def _reference(pipeline: Pipeline, served: "ServedHead", draft_length: int) -> Reference:
    facts, recipe = pipeline.facts, pipeline.recipe
    verifier = load_verifier(facts, recipe.verifier)
    tokenizer = load_tokenizer(facts.folder)
    return Reference(
        verifier,
        read_head(facts).for_states(False).to(verifier.device),
        facts,
        load_draft(served.trained or served.path, facts).to(verifier.device),
        tokenizer,
        end_of_turn_ids(facts.folder, tokenizer),
        draft_length,
        recipe.evaluate.max_new_tokens,
        served_dtype(facts, recipe.verifier),
    )


class ServedHead:
    """The head that is served, and the draft it should be: this run's checkpoint, if it was exported from that.

    Of a head that `evaluate.head` names, its manifest says so (export writes it); one from elsewhere has only itself
    to be measured against.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        recipe, self._pipeline = pipeline.recipe, pipeline
        run_dir = Path(recipe.run_dir)
        self.path = Path(recipe.evaluate.head) if recipe.evaluate.head else run_dir / "head"
        self.trained: Path | None = None
        checkpoint = run_dir / "checkpoint"
        if (checkpoint / MANIFEST).is_file() and (not recipe.evaluate.head or _is_export_of(checkpoint, self.path)):
            self.trained = checkpoint / str(read_manifest(checkpoint)["counts"]["draft"])
        if not (self.path / "config.json").is_file():
            raise BadInput(f"{self.path}: no head. Run draftsmith export first, or set evaluate.head.")

    @property
    def draft_length(self) -> int:
        """The recipe's, or the one that the head's config proposes."""
        values = read_json(self.path / "config.json").get("speculators_config") or {}
        named = [method["speculative_tokens"] for method in values.get("proposal_methods", [])]
        return self._pipeline.recipe.export.speculative_tokens or int(named[0] if named else 3)

    @property
    def suspects(self) -> list[Suspect]:
        """What a look into the head finds, beside its checkpoint, its verifier and what export wrote."""
        facts = self._pipeline.facts
        found = head_suspects(self.path, self.trained, facts)
        ours = str(choose_dtype(self._pipeline.recipe.verifier)).removeprefix("torch.")
        serving = served_dtype(facts, self._pipeline.recipe.verifier)
        if serving != ours:
            found.append(Suspect(DTYPE, f"vLLM serves in {serving}; measured here in {ours}", wrong=False))
        return found


def _is_export_of(checkpoint: Path, head: Path) -> bool:
    """Say whether a head's manifest names this checkpoint as what it was made from."""
    if not (head / MANIFEST).is_file():
        return False
    made_from = read_json(head / MANIFEST).get("made_from") or {}
    return bool(made_from.get("inputs", {}).get("checkpoint") == content_hash(checkpoint))


def head_suspects(head: Path, trained: Path | None, facts: VerifierFacts) -> list[Suspect]:
    """Return what is wrong with a head by itself, and beside the checkpoint it was exported from."""
    found: list[Suspect] = []
    config = _config(head, facts)
    if trained is not None and config is not None:
        found += _config_suspects(config, load_draft(trained, facts).config)
    named = {suspect.cause for suspect in found}
    for finding in validate_head(head, facts, trained)["findings"]:
        cause = _cause(finding)
        is_consequence = finding["where"] == "forward pass" and named
        if finding["severity"] == "error" and cause not in named and not is_consequence:
            text = f"{finding['where']}: wanted {finding['expected']}; found {finding['found']} ({finding['code']})"
            found.append(Suspect(cause, text))
    return found + _dtype_suspects(head)


def _config(head: Path, facts: VerifierFacts) -> DraftConfig | None:
    try:
        return load_draft(head, facts).config
    except (BadInput, KeyError, TypeError, ValueError):
        return None  # the validation says what is wrong


def _config_suspects(head: DraftConfig, trained: DraftConfig) -> list[Suspect]:
    found = []
    if head.aux_boundaries != trained.aux_boundaries:
        text = f"the head's config names boundaries {head.aux_boundaries}; trained on {trained.aux_boundaries}"
        found.append(Suspect(NUMBERING, text))
    for key in _NORM_KEYS:
        if getattr(head, key) != getattr(trained, key):
            text = f"the head's config says {key} = {getattr(head, key)}; trained with {getattr(trained, key)}"
            found.append(Suspect(NORMS, text))
    return found


def _cause(finding: dict[str, Any]) -> str:
    """Return which of the usual causes a finding of the head's validation is."""
    where, expected = finding["where"], finding["expected"]
    if finding["code"] == "DS405":
        return DTYPE
    if finding["code"] in ("DS406", "DS411") or where.endswith(("d2t", "t2d")):
        return VOCABULARY
    if "aux" in where or "layer_ids" in expected:
        return NUMBERING
    return NORMS if "norm_" in expected else WEIGHTS


def _dtype_suspects(head: Path) -> list[Suspect]:
    """Compare the weights' dtype with what export wrote; a server rounds them to its own without a word."""
    try:
        stored = str(read_tensors(head)[0]["fc.weight"].dtype).removeprefix("torch.")
        written = read_json(head / MANIFEST)["counts"]["dtype"]
    except (DraftsmithError, KeyError):
        return []
    text = f"the head's weights are {stored}; export wrote {written}"
    return [Suspect(DTYPE, text)] if stored != written else []


@dataclass(frozen=True)
class Prompts:
    """The prompts to ask for, rendered as training rendered its own."""

    pipeline: Pipeline
    files: list[Path]

    @cached_property
    def sets(self) -> dict[str, PromptSet]:
        """Prompts by the name of their set: a file's rows, or the held-out prompts."""
        count = self.pipeline.recipe.evaluate.prompts
        if not self.files:
            return {HELD_OUT: held_out_prompts(self.pipeline.source().split("validation"), count)}
        return {name: [(row, self._render(messages)) for row, messages in rows] for name, rows in self._rows.items()}

    @property
    def checked(self) -> bool:
        """Whether there is a template of training's to compare with."""
        return self._recorded.is_file()

    def suspects(self, server: VllmServer) -> list[Suspect]:
        """Compare the server's rendering of messages with training's, token by token."""
        given = self.pipeline.recipe.prepare.template_kwargs
        for messages in [_PROBE, *(rows[0][1] for rows in self._rows.values() if rows)]:
            theirs, ours = rendered_by_server(server, messages, given), self._render(messages)
            if isinstance(theirs, str):
                return [Suspect(TEMPLATE, f"the server cannot render messages: {theirs}")]
            if theirs is not None and theirs != ours:
                return [Suspect(TEMPLATE, self._describe(theirs, ours))]
        facts = self.pipeline.facts
        if self._recorded.is_file() and self._recorded.read_text(encoding="utf-8") != chat_template(facts.folder):
            return [Suspect(TEMPLATE, f"{facts.folder} has another template now than samples/{CHAT_TEMPLATE}")]
        return []

    def _describe(self, theirs: list[int], ours: list[int]) -> str:
        shorter = min(len(theirs), len(ours))
        first = next((i for i in range(shorter) if theirs[i] != ours[i]), shorter)
        texts = [self._template.tokenizer.decode(ids[first : first + 6]) for ids in (theirs, ours)]
        return (
            f"the server renders messages otherwise than training did: from token {first} on {texts[0]!r}, in training "
            f"{texts[1]!r} ({len(theirs)} and {len(ours)} tokens)"
        )

    @cached_property
    def _rows(self) -> dict[str, list[tuple[str, Messages]]]:
        """Rows by set: their name, and the messages before the first answer."""
        found: dict[str, list[tuple[str, Messages]]] = {}
        for file in self.files:
            rows = read_rows([RowSource(path=str(file))], "stop", RowReport())[: self.pipeline.recipe.evaluate.prompts]
            asked = []
            for row in rows:
                first = next((i for i, m in enumerate(row.messages) if m["role"] == "assistant"), len(row.messages))
                if not first:
                    raise BadInput(f"{file}: row {row.id!r} has no message to answer")
                asked.append((row.id, list(row.messages[:first])))
            if not asked:
                raise BadInput(f"{file}: no rows; evaluate.prompts says how many are taken")
            found[file.stem if file.stem not in found else str(file)] = asked
        return found

    @cached_property
    def _template(self) -> ChatTemplate:
        tokenizer = load_tokenizer(self.pipeline.facts.folder)
        if self._recorded.is_file():
            tokenizer.chat_template = self._recorded.read_text(encoding="utf-8")
        return ChatTemplate(tokenizer, self.pipeline.recipe.prepare.template_kwargs)

    @property
    def _recorded(self) -> Path:
        return Path(self.pipeline.recipe.run_dir) / "samples" / CHAT_TEMPLATE

    def _render(self, messages: Messages) -> list[int]:
        try:
            text = self._template.render(messages, generation_prompt=True)
        except Refused as error:
            raise BadInput(f"{error}") from error
        ids: list[int] = self._template.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids
