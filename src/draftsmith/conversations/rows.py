"""JSONL rows -> conversations. A row holds OpenAI-style `messages`, or a bare `prompt`.

Optional keys of a row: `id`, `split` ("train" or "validation"), `tags`, and `finished` (false: the last answer
was cut at a token limit, so nothing ended it).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import BadInput
from draftsmith.files import hash_json
from draftsmith.store.samples import SPLITS

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]


class Malformed(Exception):
    """A line that is not a readable row; the message says why."""


@dataclass(frozen=True)
class Conversation:
    """One row: its messages, and what the row says of itself. `place` is file:line.

    `answer_ids` are the tokens of the last answer if the verifier wrote it just now.
    """

    id: str
    messages: list[Message]
    place: str
    split: str | None = None
    tags: tuple[str, ...] = ()
    finished: bool = True
    answer_ids: list[int] | None = None

    @property
    def asked(self) -> list[Message]:
        """The messages that the verifier did not write."""
        return [message for message in self.messages if message["role"] != "assistant"]


@dataclass
class RowReport:
    """Counts of what was read and why rows were dropped, with the first place of each reason."""

    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first_place: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, place: str) -> None:
        """Count one dropped row."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.first_place.setdefault(reason, place)


def read_rows(paths: list[Path], malformed: str, report: RowReport) -> list[Conversation]:
    """Read all rows of `paths`; duplicates (same questions) are dropped and counted.

    Raises BadInput for a missing file, and for a malformed line unless `malformed` is "drop".
    """
    conversations: dict[str, Conversation] = {}
    for path in paths:
        if not path.is_file():
            raise BadInput(f"{path}: no such file (prepare.input)")
        for number, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            report.rows += 1
            place = f"{path.name}:{number}"
            try:
                conversation = parse_row(line, place)
            except Malformed as error:
                if malformed == "stop":
                    raise BadInput(
                        f"{path}: line {number}: {error}. Mend the line, or set prepare.malformed = 'drop' "
                        "to leave such lines out and count them."
                    ) from error
                report.drop("malformed line", f"{place} ({error})")
                continue
            key = hash_json(conversation.asked)
            if key in conversations:
                report.drop("duplicate", f"{place}, same as {conversations[key].place}")
            else:
                conversations[key] = conversation
    if not report.rows:
        raise BadInput(f"{', '.join(map(str, paths))}: no rows")
    return list(conversations.values())


def parse_row(line: bytes, place: str) -> Conversation:
    """Turn one line into a conversation; raise Malformed if it is not one."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 at byte {error.start} of the line") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise Malformed(f"invalid JSON: {error}") from error
    if not isinstance(row, dict):
        raise Malformed(f"wanted a JSON object, found {type(row).__name__}")
    messages = _messages(row)
    split = row.get("split")
    if split not in (None, *SPLITS):
        raise Malformed(f"split is {split!r}, wanted one of {', '.join(SPLITS)}")
    tags = row.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise Malformed("tags is not a list of strings")
    identifier = str(row["id"]) if "id" in row else hash_json(messages)[:16]
    return Conversation(identifier, messages, place, split, tuple(tags), row.get("finished") is not False)


def _messages(row: dict[str, Any]) -> list[Message]:
    if "messages" in row:
        messages = row["messages"]
    elif "prompt" in row:
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        raise Malformed(f"neither `messages` nor `prompt` among its keys ({', '.join(row) or 'none'})")
    if not isinstance(messages, list) or not messages:
        raise Malformed("`messages` is not a list with at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise Malformed(f"message {number} has no text as content")
        if message.get("role") not in ROLES:
            raise Malformed(f"message {number} has role {message.get('role')!r}, wanted one of {', '.join(ROLES)}")
    return messages


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file
