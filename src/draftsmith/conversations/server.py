"""A server of the verifier writes the answers: any with OpenAI-style completions that takes token ids (vLLM, SGLang).

The rendered prompt goes there as token ids, never as text, and the answer's token ids are taken from the server where
it returns them (vLLM: `return_token_ids`), so that the mask is exactly what was generated. Many conversations are
asked at once, each turn by turn. Finished ones are appended to a file, a line each: a killed run asks only for the
rest, and gives the same rows.
"""

import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.conversations.answers import prompt_of, questions
from draftsmith.conversations.shapes import Conversation, Message
from draftsmith.conversations.template import ChatTemplate
from draftsmith.errors import BadInput, DraftsmithError
from draftsmith.files import hash_json
from draftsmith.progress import progress
from draftsmith.recipe import PrepareRecipe

_ATTEMPTS, _FIRST_DELAY, _TIMEOUT = 7, 0.5, 600.0
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


class _Rejected(Exception):
    """The server will not answer this request, however often it is asked."""


@dataclass(frozen=True)
class Server:
    """A server's address and the name of its model."""

    url: str
    model: str

    @classmethod
    def find(cls, url: str) -> "Server":
        """Ask a server which model it has; raise DraftsmithError if it does not answer."""
        try:
            listed = _request(f"{url.rstrip('/')}/models", None)
        except _Rejected as reason:
            raise BadInput(f"{url}: not an OpenAI-style server ({reason}); wanted http://HOST:PORT/v1") from reason
        return cls(url.rstrip("/"), str(listed["data"][0]["id"]))

    def complete(self, prompt: list[int], recipe: PrepareRecipe, seed: int) -> dict[str, Any]:
        """Return the first choice for a prompt of token ids."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": recipe.max_new_tokens,
            "temperature": recipe.temperature,
            "top_p": recipe.top_p,
            "seed": seed,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        choice: dict[str, Any] = _request(f"{self.url}/completions", body)["choices"][0]
        return choice


def answer_by_server(
    conversations: list[Conversation],
    folder: Path,
    template: ChatTemplate,
    end_ids: list[int],
    recipe: PrepareRecipe,
    seed: int,
) -> list[Conversation]:
    """Return the conversations with the server's answers, in their order; those answered before are not asked again."""
    folder.mkdir(exist_ok=True)
    log = folder / "server.jsonl"
    done = _read_log(log)
    keys = [hash_json([conversation.id, conversation.asked]) for conversation in conversations]
    missing = [i for i, key in enumerate(keys) if key not in done]
    if missing:
        server = Server.find(recipe.server_url)
        with (
            log.open("ab") as file,
            ThreadPoolExecutor(recipe.server_requests) as pool,
            progress("answers", len(keys), "conversations", len(keys) - len(missing)) as meter,
        ):
            asked = {
                pool.submit(_converse, server, conversations[i], template, end_ids, recipe, seed): i for i in missing
            }
            try:
                for future in as_completed(asked):
                    key = keys[asked[future]]
                    done[key] = future.result()
                    file.write(json.dumps([key, done[key]], ensure_ascii=False).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                    meter.advance(1)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [replace(c, **done[key]) for c, key in zip(conversations, keys, strict=True)]


def _read_log(path: Path) -> dict[str, dict[str, Any]]:
    """Read the finished conversations; cut off a line that a kill left half-written."""
    done: dict[str, dict[str, Any]] = {}
    if not path.is_file():
        return done
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    for line in whole.splitlines():
        key, answer = json.loads(line)
        done[key] = answer
    return done


def _converse(
    server: Server,
    conversation: Conversation,
    template: ChatTemplate,
    end_ids: list[int],
    recipe: PrepareRecipe,
    seed: int,
) -> dict[str, Any]:
    """Have one conversation; return its `messages`, `finished` and `answer_ids`."""
    written: list[Message] = []
    finished, ids = True, None
    for asked in questions(conversation.messages):
        written += asked
        prompt = prompt_of(template, conversation, written)
        if prompt is None:
            break
        tokens = template.tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
        try:
            choice = server.complete(tokens, recipe, seed)
        except _Rejected as reason:
            return {"messages": conversation.messages, "rejected": f"the server refuses: {reason}"}
        finished = choice.get("finish_reason") == "stop"
        ids = _answer_ids(choice, finished, end_ids)
        text = _text(choice, ids, template.tokenizer, end_ids)
        written.append({"role": "assistant", "content": text})
        if not finished or not text:
            break
    return {"messages": written, "finished": finished, "answer_ids": ids}


def _answer_ids(choice: dict[str, Any], finished: bool, end_ids: list[int]) -> list[int] | None:
    """Return the generated ids, the end-of-turn token among them; None if the server does not tell."""
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not ids:
        return None
    ids = [int(token) for token in ids]
    if finished and ids[-1] not in end_ids:
        stop = choice.get("stop_reason")
        ids.append(stop if isinstance(stop, int) and stop in end_ids else end_ids[0])
    return ids


def _text(choice: dict[str, Any], ids: list[int] | None, tokenizer: Any, end_ids: list[int]) -> str:
    if ids is not None:
        answer = ids[:-1] if ids[-1] in end_ids else ids
        return str(tokenizer.decode(answer, skip_special_tokens=False))
    text = str(choice.get("text", ""))
    for token in end_ids:
        text = text.removesuffix(tokenizer.convert_ids_to_tokens(token))
    return text


def _request(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Send a request, again after a growing delay while the server is busy or away.

    Raises _Rejected for a request that it refuses, DraftsmithError if it stays away.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    reason = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_DELAY * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                answer: dict[str, Any] = json.loads(response.read())
                return answer
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.read()[:300].decode('utf-8', 'replace')}"
            if error.code not in _AGAIN:
                raise _Rejected(reason) from error
        except (urllib.error.URLError, TimeoutError, ConnectionError, json.JSONDecodeError) as error:
            reason = str(error)
    raise DraftsmithError(
        f"{url}: no answer after {_ATTEMPTS} attempts ({reason}). Start the server and run the same command again: it "
        "goes on where it stopped."
    )
