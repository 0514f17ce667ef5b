"""Write docs/templates.md: `python tests/write_templates.py` (or `make docs`)."""

from pathlib import Path

from draftsmith.conversations.template import ChatTemplate
from template_cases import CASES, TEMPLATES, TOOLS, end_ids_of, needs, outcome, small_tokenizer

PAGE = Path(__file__).parent.parent / "docs" / "templates.md"
_HEAD = """# Chat templates

What `prepare` makes of real chat templates, each with a small tokenizer that has the template's special tokens. Made by
`make docs`; the tests prove every supported cell: decoded, the masked text is what the verifier would have generated
from the template's own prompt, its one end-of-turn token included.

* **whole**: one sample; all answers stand in one rendering, where serving would see them.
* **per turn**: the template renders earlier turns otherwise than the last one (drops reasoning, moves the system
  prompt, closes the last turn differently), so each answer is a sample with the context that serving would see.
* `enable_thinking=False` and the like: the template writes such an answer only in that mode. `prepare` counts and names
  the mode, and serving needs the same.
* a letter: refused; the reasons stand below. Nothing is guessed.

Answers that the verifier writes itself (`prepare.answers`) need none of this for the last turn: their tokens are known.

"""


def rendered() -> str:
    """Return the page."""
    reasons: dict[str, str] = {}
    rows: list[str] = []
    counts = {"supported": 0, "refused": 0}
    supported = 0
    for path in sorted(TEMPLATES.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        tokenizer = small_tokenizer(source)
        note, given, tools = needs(source, tokenizer)
        end_ids = end_ids_of(tokenizer, given | ({"tools": TOOLS} if tools else {}))
        template = ChatTemplate(tokenizer, given)
        cells = []
        for case in CASES:
            kind, samples = outcome(template, case, end_ids, tools)
            counts["supported" if samples else "refused"] += 1
            reason = kind.removeprefix("refused: ")
            cells.append(kind if samples else reasons.setdefault(reason, _letter(len(reasons))))
        supported += any(len(cell) > 2 for cell in cells)
        rows.append(f"| {path.stem}{f' ({note})' if note else ''} | {' | '.join(cells)} |")
    head = f"| template | {' | '.join(CASES)} |\n|{'---|' * (len(CASES) + 1)}"
    summary = (
        f"{supported} of {len(rows)} templates are supported; "
        f"of {sum(counts.values())} cells {counts['supported']} are, "
        f"{counts['refused']} are refused with a reason.\n\n"
    )
    listed = "\n".join(f"* **{letter}** {reason.replace('|', chr(92) + '|')}" for reason, letter in reasons.items())
    return _HEAD + summary + head + "\n" + "\n".join(rows) + "\n\n## Reasons\n\n" + listed + "\n"


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else "Z" + chr(ord("A") + number - 26)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
