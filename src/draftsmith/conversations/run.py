"""prepare: rows of conversations or prompts -> samples with loss masks.

Writes samples.parquet (see store/samples.py), conversations.jsonl (the same conversations as text) and
token_counts.parquet (how often each token occurs and is supervised in the train split).
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.conversations.answers import answer_all
from draftsmith.conversations.mask import Refused, tokenise
from draftsmith.conversations.rows import Conversation, RowReport, read_rows
from draftsmith.draft.vocabulary import count_supervised, coverage
from draftsmith.errors import BadInput
from draftsmith.files import commit, hash_json, temporary_name, write_text
from draftsmith.progress import progress
from draftsmith.recipe import PrepareRecipe, VerifierRecipe
from draftsmith.store.manifest import StageFolder
from draftsmith.store.samples import SAMPLES_FILE, Sample, write_samples
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.tokens import end_of_turn_ids, load_tokenizer

_CONVERSATIONS_FILE = "conversations.jsonl"
_COUNTS_FILE = "token_counts.parquet"
_VOCABULARY_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)


def run_prepare(
    folder: StageFolder,
    facts: VerifierFacts,
    recipe: PrepareRecipe,
    verifier_recipe: VerifierRecipe,
    seed: int,
) -> dict[str, Any]:
    """Write samples/; go on where an interrupted run stopped. Returns the counts."""
    report = RowReport()
    conversations = read_rows([Path(name) for name in recipe.input], recipe.malformed, report)
    tokenizer = load_tokenizer(facts.folder)
    end_ids = end_of_turn_ids(facts.folder, tokenizer)
    folder.begin()
    chunks = folder.path / "answers"
    if recipe.answers == "verifier":
        conversations = answer_all(conversations, chunks, tokenizer, end_ids, facts, recipe, verifier_recipe, seed)
    kept: list[tuple[Conversation, Sample]] = []
    truncated = 0
    for conversation in _with_progress(conversations):
        try:
            if recipe.unfinished == "drop" and not conversation.finished:
                raise Refused("answer cut at the token limit")
            if conversation.messages[-1] == {"role": "assistant", "content": ""}:
                raise Refused("empty answer")
            result = tokenise(
                tokenizer,
                conversation.messages,
                end_ids,
                recipe.max_length,
                conversation.finished,
                conversation.answer_ids,
            )
        except Refused as reason:
            report.drop(str(reason), conversation.place)
            continue
        truncated += result.truncated
        split = conversation.split or _split(conversation, recipe.validation_share, seed)
        sample = Sample(conversation.id, result.input_ids, result.loss_mask, split, conversation.tags)
        kept.append((conversation, sample))
    if not kept:
        folder.remove()
        raise BadInput("no sample is left; dropped: " + "; ".join(_reasons(report)))
    samples = [sample for _, sample in kept]
    write_samples(folder.path, samples)
    write_text(folder.path / _CONVERSATIONS_FILE, "".join(_json_lines(kept)))
    counts = _counts(report, kept, truncated)
    counts["coverage"] = _write_token_counts(folder.path / _COUNTS_FILE, samples, facts.vocab_size)
    folder.finish(counts, [SAMPLES_FILE, _CONVERSATIONS_FILE, _COUNTS_FILE])
    shutil.rmtree(chunks, ignore_errors=True)
    return counts


def _with_progress(conversations: list[Conversation]) -> Iterator[Conversation]:
    with progress("tokenise", len(conversations), "conversations") as meter:
        for conversation in conversations:
            yield conversation
            meter.advance(1)


def _split(conversation: Conversation, share: float, seed: int) -> str:
    """Choose the split from the hash of what was asked, so that it does not depend on other rows."""
    place = int(hash_json([seed, conversation.asked])[:12], 16) / 16**12
    return "validation" if place < share else "train"


def _reasons(report: RowReport) -> list[str]:
    return [f"{count} x {why} (first: {report.first_place[why]})" for why, count in report.dropped.items()]


def _counts(report: RowReport, kept: list[tuple[Conversation, Sample]], truncated: int) -> dict[str, Any]:
    samples = [sample for _, sample in kept]
    return {
        "rows": report.rows,
        "samples": len(samples),
        "train": sum(sample.split == "train" for sample in samples),
        "validation": sum(sample.split == "validation" for sample in samples),
        "dropped": dict(sorted(report.dropped.items())),
        "first_dropped": dict(sorted(report.first_place.items())),
        "truncated": truncated,
        "unfinished": sum(not conversation.finished for conversation, _ in kept),
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "supervised_tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
    }


def _json_lines(kept: list[tuple[Conversation, Sample]]) -> Iterator[str]:
    for conversation, sample in kept:
        row = {
            "id": sample.id,
            "tags": list(sample.tags),
            "split": sample.split,
            "finished": conversation.finished,
            "messages": conversation.messages,
        }
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
