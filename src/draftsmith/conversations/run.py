"""prepare: rows of conversations or prompts -> samples with loss masks.

Writes samples.parquet (see store/samples.py), conversations.jsonl (the same conversations as text),
token_counts.parquet (how often each token occurs and is supervised in the train split) and the chat template.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.conversations.answers import answer_all
from draftsmith.conversations.length import truncate, windows
from draftsmith.conversations.mask import Masker, Tokenised
from draftsmith.conversations.server import answer_by_server
from draftsmith.conversations.shapes import Conversation
from draftsmith.conversations.sources import RowReport, read_rows
from draftsmith.conversations.tally import Tally
from draftsmith.conversations.template import ChatTemplate, Refused
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
    tally = Tally(facts.vocab_size)
    write_samples(folder.path, _stream(asked, Masker(template, end_ids), recipe, report, tally, folder.path, seed))
    if not tally.conversations:
        folder.remove()
        raise BadInput("no sample is left; dropped: " + "; ".join(_reasons(report)))
    commit(folder.path / _CONVERSATIONS_FILE)
    write_text(folder.path / CHAT_TEMPLATE, chat_template(facts.folder))
    tally.write_token_counts(folder.path / _COUNTS_FILE)
    counts = tally.as_json(report)
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


def _stream(
    conversations: list[Conversation],
    masker: Masker,
    recipe: PrepareRecipe,
    report: RowReport,
    tally: Tally,
    folder: Path,
    seed: int,
) -> Iterator[Sample]:
    """Yield the samples of all conversations, in their order; write the conversations as text on the way."""
    usable = [c for c in conversations if not _is_refused(c, recipe, report, tally.vocab_size)]
    with (
        temporary_name(folder / _CONVERSATIONS_FILE).open("w", encoding="utf-8") as text,
        progress("tokenise", len(usable), "conversations") as meter,
    ):
        for conversation, whole in masker.tokenise_all(usable):
            meter.advance(1)
            try:
                if isinstance(whole, Refused):
                    raise whole
                fitting = _fit(whole, masker.tokenizer, recipe, tally)
            except Refused as reason:
                report.drop(str(reason), conversation.place)
                continue
            split = conversation.split or _split(conversation, recipe.validation_share, seed)
            parts = [""] if len(fitting) == 1 else [f"/{i}" for i in range(len(fitting))]
            samples = [
                Sample(conversation.id + part, sample.input_ids, sample.loss_mask, split, conversation.tags)
                for part, sample in zip(parts, fitting, strict=True)
            ]
            tally.add(conversation, whole, samples)
            text.write(_json_line(conversation, split))
            yield from samples


def _is_refused(conversation: Conversation, recipe: PrepareRecipe, report: RowReport, vocab_size: int) -> bool:
    """Drop what is of no use whatever the template makes of it."""
    reason = conversation.rejected
    if conversation.tokens is not None and max(conversation.tokens[0]) >= vocab_size:
        reason = "a token id outside the vocabulary"
    if recipe.unfinished == "drop" and not conversation.finished:
        reason = "answer cut at the token limit"
    elif conversation.messages and conversation.messages[-1] == {"role": "assistant", "content": ""}:
        reason = "empty answer"
    if reason is not None:
        report.drop(reason, conversation.place)
    return reason is not None


def _fit(whole: list[Tokenised], tokenizer: Any, recipe: PrepareRecipe, tally: Tally) -> list[Tokenised]:
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
                tally.windowed += long
            else:
                fitting.append(truncate(sample, recipe.max_length, tokenizer))
                tally.truncated += long
        except Refused as error:
            reason = error
    if not fitting:
        raise reason or Refused("no supervised token within max_length")
    return fitting


def _split(conversation: Conversation, share: float, seed: int) -> str:
    """Choose the split from the hash of what was asked, so that it does not depend on other rows."""
    place = int(hash_json([seed, conversation.asked])[:12], 16) / 16**12
    return "validation" if place < share else "train"


def _reasons(report: RowReport) -> list[str]:
    return [f"{count} x {why} (first: {report.first_place[why]})" for why, count in report.dropped.items()]


def _json_line(conversation: Conversation, split: str) -> str:
    row = {
        "id": conversation.id,
        "tags": list(conversation.tags),
        "split": split,
        "finished": conversation.finished,
        "messages": conversation.messages,
    } | ({"tools": conversation.tools} if conversation.tools else {})
    return json.dumps(row, ensure_ascii=False) + "\n"
