"""The verifier writes the answers: every assistant turn of a conversation, turn by turn, in batches.

Answers are kept in chunks, one file per batch of conversations, so that a killed run loses one batch. A chunk
depends on its conversations and the recipe alone: a restarted run writes the same bytes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.conversations.shapes import Conversation, Message
from draftsmith.conversations.template import ChatTemplate, Refused
from draftsmith.files import hash_json, write_json
from draftsmith.progress import progress
from draftsmith.recipe import PrepareRecipe, VerifierRecipe
from draftsmith.store.manifest import read_json
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.run import RunningVerifier, load_verifier


def answer_all(
    conversations: list[Conversation],
    chunk_folder: Path,
    template: ChatTemplate,
    end_ids: list[int],
    facts: VerifierFacts,
    recipe: PrepareRecipe,
    verifier_recipe: VerifierRecipe,
    seed: int,
) -> list[Conversation]:
    """Return the conversations with the verifier's answers, in their order; finished chunks are reused."""
    order = sorted(range(len(conversations)), key=lambda i: (_characters(conversations[i]), i))
    size = recipe.batch_size
    chunks = [order[start : start + size] for start in range(0, len(order), size)]
    files = [chunk_folder / f"{number:06d}.json" for number in range(len(chunks))]
    chunk_folder.mkdir(exist_ok=True)
    missing = [number for number, file in enumerate(files) if not file.is_file()]
    if missing:
        verifier = load_verifier(facts, verifier_recipe)
        done = len(order) - sum(len(chunks[number]) for number in missing)
        with progress("answers", len(order), "conversations", done) as meter:
            for number in missing:
                members = [conversations[i] for i in chunks[number]]
                torch.manual_seed(int(hash_json([seed, number])[:15], 16))
                answers = _answer_chunk(verifier, members, template, end_ids, recipe)
                write_json(files[number], {"answers": answers})
                meter.advance(len(members))
    answered = list(conversations)
    for chunk, file in zip(chunks, files, strict=True):
        for i, answer in zip(chunk, read_json(file)["answers"], strict=True):
            answered[i] = replace(conversations[i], **answer)
    return answered


def _answer_chunk(
    verifier: RunningVerifier,
    conversations: list[Conversation],
    template: ChatTemplate,
    end_ids: list[int],
    recipe: PrepareRecipe,
) -> list[dict[str, Any]]:
    """Answer some conversations together; return each one's `messages`, `finished` and `answer_ids`."""
    tokenizer = template.tokenizer
    pending = [questions(conversation.messages) for conversation in conversations]
    written: list[list[Message]] = [[] for _ in conversations]
    finished = [True] * len(conversations)
    answer_ids: list[list[int] | None] = [None] * len(conversations)
    while active := [i for i in range(len(conversations)) if pending[i] and finished[i]]:
        prompts = []
        for i in active:
            written[i] += pending[i].pop(0)
            prompts.append(prompt_of(template, conversations[i], written[i]))
        replies = generate(verifier, [p or "" for p in prompts], tokenizer, end_ids, recipe)
        for i, prompt, ids in zip(active, prompts, replies, strict=True):
            if prompt is None:
                pending[i] = []
                continue
            finished[i] = ids[-1] in end_ids
            text = tokenizer.decode(ids[:-1] if finished[i] else ids, skip_special_tokens=False)
            written[i].append({"role": "assistant", "content": text})
            answer_ids[i] = ids
            if not text:
                pending[i] = []
    columns = zip(written, finished, answer_ids, strict=True)
    return [{"messages": m, "finished": f, "answer_ids": ids} for m, f, ids in columns]


@torch.inference_mode()
def generate(
    verifier: RunningVerifier, prompts: list[str], tokenizer: Any, end_ids: list[int], recipe: PrepareRecipe
) -> list[list[int]]:
    """Let the verifier continue rendered prompts; return the tokens of each, an end-of-turn token included."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = end_ids[0]
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt").to(verifier.device)
    sampling = (
        {"do_sample": True, "temperature": recipe.temperature, "top_p": recipe.top_p, "top_k": 0}
        if recipe.temperature > 0
        else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    )
    output = verifier.model.generate(
        **batch,
        **sampling,
        max_new_tokens=recipe.max_new_tokens,
        eos_token_id=end_ids,
        pad_token_id=tokenizer.pad_token_id,
    )
    replies = []
    for row in output[:, batch["input_ids"].shape[1] :].tolist():
        stop = next((n + 1 for n, token in enumerate(row) if token in end_ids), len(row))
        replies.append(row[:stop])
    return replies


def questions(messages: list[Message]) -> list[list[Message]]:
    """Split messages into what stands before each assistant turn; a last one without answer counts.

    system, user, assistant, user -> [[system, user], [user]]
    """
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            groups.append([])
        else:
            groups[-1].append(message)
    return [group for group in groups if group]


def prompt_of(template: ChatTemplate, conversation: Conversation, messages: list[Message]) -> str | None:
    """Return the rendered prompt, or None if the template rejects it (tokenising will say so and count it)."""
    try:
        return template.render(messages, generation_prompt=True, tools=conversation.tools)
    except Refused:
        return None


def _characters(conversation: Conversation) -> int:
    return sum(len(message["content"]) for message in conversation.messages if message["role"] != "assistant")
