"""prepare: rows of conversations or prompts -> samples with loss masks.

Writes samples.parquet (see store/samples.py), conversations.jsonl (the same conversations as text),
token_counts.parquet (how often each token occurs and is supervised in the train split) and the chat template.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.conversations.answers import answer_all
from draftsmith.conversations.length import truncate, windows
from draftsmith.conversations.mask import Masker, Tokenised
from draftsmith.conversations.server import answer_by_server
from draftsmith.conversations.shapes import Conversation
from draftsmith.conversations.sources import RowReport, read_rows
from draftsmith.conversations.template import ChatTemplate, Refused
from draftsmith.draft.vocabulary import count_supervised, coverage
from draftsmith.errors import BadInput
from draftsmith.files import commit, hash_json, temporary_name, write_text
from draftsmith.progress import progress
from draftsmith.recipe import PrepareRecipe, VerifierRecipe
from draftsmith.store.manifest import StageFolder
from draftsmith.store.samples import CHAT_TEMPLATE, SAMPLES_FILE, Sample, write_samples
from draftsmith.verifier.facts import VerifierFacts, chat_template
from draftsmith.verifier.tokens import end_of_turn_ids, load_tokenizer

_CONVERSATIONS_FILE = "conversations.jsonl"
_COUNTS_FILE = "token_counts.parquet"
_VOCABULARY_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass
class _Made:
    """Samples with the conversations they are of, and what happened on the way."""

    kept: list[tuple[Conversation, list[Sample]]] = field(default_factory=list)
    truncated: int = 0
    windowed: int = 0
    per_turn: int = 0
    without_reasoning: int = 0
    modes: Counter[str] = field(default_factory=Counter)

    @property
    def samples(self) -> list[Sample]:
        """All samples, in the order of their conversations."""
        return [sample for _, samples in self.kept for sample in samples]


def run_prepare(
    folder: StageFolder,
    facts: VerifierFacts,
    recipe: PrepareRecipe,
    verifier_recipe: VerifierRecipe,
    seed: int,
) -> dict[str, Any]:
    """Write samples/; go on where an interrupted run stopped. Returns the counts."""
    report = RowReport()
    conversations = read_rows(recipe.input, recipe.malformed, report)
    template = ChatTemplate(load_tokenizer(facts.folder), recipe.template_kwargs)
    end_ids = end_of_turn_ids(facts.folder, template.tokenizer)
    folder.begin()
    chunks = folder.path / "answers"
    asked = [conversation for conversation in conversations if _is_answered_anew(conversation, recipe, report)]
    if recipe.answers == "verifier":
        asked = answer_all(asked, chunks, template, end_ids, facts, recipe, verifier_recipe, seed)
    elif recipe.answers == "server":
        asked = answer_by_server(asked, chunks, template, end_ids, recipe, seed)
    made = _make_samples(asked, Masker(template, end_ids), recipe, report, seed)
    if not made.kept:
        folder.remove()
        raise BadInput("no sample is left; dropped: " + "; ".join(_reasons(report)))
    samples = made.samples
    write_samples(folder.path, samples)
    write_text(folder.path / _CONVERSATIONS_FILE, "".join(_json_lines(made)))
    write_text(folder.path / CHAT_TEMPLATE, chat_template(facts.folder))
    counts = _counts(report, made)
    counts["coverage"] = _write_token_counts(folder.path / _COUNTS_FILE, samples, facts.vocab_size)
    folder.finish(counts, [SAMPLES_FILE, _CONVERSATIONS_FILE, _COUNTS_FILE, CHAT_TEMPLATE])
    shutil.rmtree(chunks, ignore_errors=True)
    return counts


def _is_answered_anew(conversation: Conversation, recipe: PrepareRecipe, report: RowReport) -> bool:
    """Drop what the verifier cannot answer anew: tool results belong to calls that are not kept."""
    if recipe.answers == "keep":
        return True
    if conversation.tokens is not None:
        report.drop("tokenised already: its answers cannot be written anew", conversation.place)
        return False
    if any(message["role"] == "tool" for message in conversation.messages):
        report.drop("tool results of answers that are not kept", conversation.place)
        return False
    return True


def _make_samples(
    conversations: list[Conversation], masker: Masker, recipe: PrepareRecipe, report: RowReport, seed: int
) -> _Made:
    made = _Made()
    usable = [c for c in conversations if not _is_refused(c, recipe, report)]
    with progress("tokenise", len(usable), "conversations") as meter:
        for conversation, whole in masker.tokenise_all(usable):
            try:
                if isinstance(whole, Refused):
                    raise whole
                samples = _fit(whole, masker.tokenizer, recipe, made)
            except Refused as reason:
                report.drop(str(reason), conversation.place)
            else:
                split = conversation.split or _split(conversation, recipe.validation_share, seed)
                parts = [""] if len(samples) == 1 else [f"/{i}" for i in range(len(samples))]
                named = [
                    Sample(conversation.id + part, sample.input_ids, sample.loss_mask, split, conversation.tags)
                    for part, sample in zip(parts, samples, strict=True)
                ]
                made.kept.append((conversation, named))
            meter.advance(1)
    return made


def _is_refused(conversation: Conversation, recipe: PrepareRecipe, report: RowReport) -> bool:
    """Drop what is of no use whatever its tokens are."""
    reason = conversation.rejected
    if recipe.unfinished == "drop" and not conversation.finished:
        reason = "answer cut at the token limit"
    elif conversation.messages and conversation.messages[-1] == {"role": "assistant", "content": ""}:
        reason = "empty answer"
    if reason is not None:
        report.drop(reason, conversation.place)
    return reason is not None


def _fit(whole: list[Tokenised], tokenizer: Any, recipe: PrepareRecipe, made: _Made) -> list[Tokenised]:
    """Fit one conversation's samples to the longest length; raise Refused if nothing of them is left."""
    fitting: list[Tokenised] = []
    reason: Refused | None = None
    for sample in whole:
        long = len(sample.input_ids) > recipe.max_length
        try:
            if long and recipe.long == "drop":
                raise Refused("longer than max_length")
            if recipe.long == "window":
                fitting += windows(sample, recipe.max_length, tokenizer)
                made.windowed += long
            else:
                fitting.append(truncate(sample, recipe.max_length, tokenizer))
                made.truncated += long
        except Refused as error:
            reason = error
    if not fitting:
        raise reason or Refused("no supervised token within max_length")
    made.per_turn += len(whole) > 1
    made.without_reasoning += any(sample.drops_reasoning for sample in whole)
    made.modes.update({json.dumps(sample.mode, sort_keys=True) for sample in whole if sample.mode})
    return fitting


def _split(conversation: Conversation, share: float, seed: int) -> str:
    """Choose the split from the hash of what was asked, so that it does not depend on other rows."""
    place = int(hash_json([seed, conversation.asked])[:12], 16) / 16**12
    return "validation" if place < share else "train"


def _reasons(report: RowReport) -> list[str]:
    return [f"{count} x {why} (first: {report.first_place[why]})" for why, count in report.dropped.items()]


def _counts(report: RowReport, made: _Made) -> dict[str, Any]:
    samples = made.samples
    return {
        "rows": report.rows,
        "conversations": len(made.kept),
        "samples": len(samples),
        "train": sum(sample.split == "train" for sample in samples),
        "validation": sum(sample.split == "validation" for sample in samples),
        "dropped": dict(sorted(report.dropped.items())),
        "first_dropped": dict(sorted(report.first_place.items())),
        "truncated": made.truncated,
        "windowed": made.windowed,
        "per_turn": made.per_turn,
        "without_reasoning": made.without_reasoning,
        "template_modes": dict(sorted(made.modes.items())),
        "unfinished": sum(not conversation.finished for conversation, _ in made.kept),
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "supervised_tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
    }


def _json_lines(made: _Made) -> Iterator[str]:
    for conversation, samples in made.kept:
        row = {
            "id": conversation.id,
            "tags": list(conversation.tags),
            "split": samples[0].split,
            "finished": conversation.finished,
            "messages": conversation.messages,
        } | ({"tools": conversation.tools} if conversation.tools else {})
        yield json.dumps(row, ensure_ascii=False) + "\n"


def _write_token_counts(path: Path, samples: list[Sample], vocab_size: int) -> dict[str, float]:
    """Count the train split's tokens by id; return the coverage of draft vocabularies."""
    train = [sample for sample in samples if sample.split == "train"]
    every = count_supervised(((s.input_ids, np.ones_like(s.input_ids)) for s in train), vocab_size)
    supervised = count_supervised(((s.input_ids, s.loss_mask) for s in train), vocab_size)
    token = np.flatnonzero(every)
    table = pa.table({"token": token, "count": every[token], "supervised": supervised[token]})
    pq.write_table(table, temporary_name(path))
    commit(path)
    return coverage(supervised, [size for size in _VOCABULARY_SIZES if size <= vocab_size])
