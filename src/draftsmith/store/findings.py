"""Findings and the catalogue of checks: plain types that every reader and every check may use.

A code keeps its meaning for ever. `docs/checks.md` shows this catalogue; a test keeps the two the same.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from draftsmith.errors import BadInput

Severity = Literal["error", "warning"]
Depth = Literal["structure", "values", "meaning"]


class Check(NamedTuple):
    """What a code stands for: its severity, what is wrong, what follows if nobody notices, and the cure."""

    severity: Severity
    title: str
    consequence: str
    cure: str


_AGAIN = "write the file again from its source"
_LOST = "training stops at it, or a reader skips it without a word"

CATALOGUE: dict[str, Check] = {
    # structure: names, headers and tables
    "DS101": Check("error", "unfinished or unreadable store", "samples are missing", "run it again: it goes on"),
    "DS102": Check("error", "file missing, or of another size than its manifest says", _LOST, "restore or extract"),
    "DS103": Check("error", "shard whose header or tables were changed", "masks or tokens are wrong", "extract again"),
    "DS104": Check("error", "shard that is not the one its store planned", "two stores are mixed", "extract again"),
    "DS105": Check(
        "error", "data of another verifier", "the head learns another model", "use its verifier, or extract again"
    ),
    "DS106": Check("warning", "file that does not belong there", "other tools take it for a sample", "move it away"),
    "DS107": Check("error", "file of another kind than its name says", _LOST, _AGAIN),
    "DS108": Check("error", "truncated file", _LOST, _AGAIN),
    "DS109": Check("error", "file whose directory or header is damaged", _LOST, _AGAIN),
    "DS110": Check(
        "error", "file that would run code when unpickled", "torch.load could run it", "delete it; ask who wrote it"
    ),
    "DS111": Check(
        "error", "file that unpacks to far more than it holds", "memory or disk run out", "delete it; ask who wrote it"
    ),
    "DS112": Check("error", "key missing", _LOST, _AGAIN),
    "DS113": Check("warning", "key that the format does not know", "another tool wrote or changed it", "see who did"),
    "DS114": Check("error", "value of another type than the format has", _LOST, _AGAIN),
    "DS115": Check(
        "error", "another number of states than layers", "states feed the wrong input of the draft", _AGAIN
    ),
    "DS116": Check(
        "error", "states, tokens and mask of different lengths", "states of other tokens (prefix caching)", _AGAIN
    ),
    "DS117": Check("error", "another hidden width", "states of another model", _AGAIN),
    "DS118": Check(
        "error", "another length than sample_lengths.json says", "batches overflow, or states are missing", _AGAIN
    ),
    "DS119": Check("error", "unexpected or mixed dtypes", "rounding or range differs between samples", _AGAIN),
    "DS120": Check("warning", "holes in the numbering", "samples are missing for ever", "generate the missing ones"),
    "DS121": Check("error", "a number that occurs twice", "one sample counts twice, another is lost", "keep one"),
    "DS122": Check("error", "file in a folder for other numbers", "two runs are mixed", "move it where it belongs"),
    "DS123": Check("warning", "leftover of an interrupted write", "some readers take it for a sample", "delete it"),
    "DS124": Check(
        "warning", "nothing says which layers the states are of", "a head one layer off accepts nothing",
        "validate with --verifier (it finds out), or set data.boundaries",
    ),
    "DS125": Check(
        "error", "data_config.json contradicts the files", "states feed the wrong input of the draft",
        "find which of the two is right",
    ),
    "DS126": Check("error", "empty sample", "a division by zero, or a shifted batch", "delete it"),
    "DS127": Check("warning", "over-long sample", "training cuts it or runs out of memory", "cut or leave it out"),
    "DS128": Check("warning", "storage that no tensor shows", "disk and reading time go to waste", "clone it first"),
    "DS129": Check(
        "error", "companion file that is damaged or contradicts itself", "draft ids turn into wrong tokens", _AGAIN
    ),
    "DS130": Check(
        "error", "states file without a row in the dataset", "rows and states are of two runs", "generate it again"
    ),
    # values: every byte once
    "DS201": Check("error", "states are not the bytes that were written", "flipped bits", "extract the shard again"),
    "DS202": Check("error", "NaN in states", "the loss becomes NaN", "compute the verifier in float32 or bfloat16"),
    "DS203": Check("error", "rows of states that are all zero", "padding or unwritten memory as data", _AGAIN),
    "DS204": Check("error", "token id outside the vocabulary", "a crash, or another tokenizer", "tokenise again"),
    "DS205": Check("error", "loss mask with values other than 0 and 1", "tokens weigh more or less", "mend the mask"),
    "DS206": Check("warning", "sample without a supervised token", "nothing is learnt from it", "mend the mask"),
    "DS207": Check("error", "two layers with identical states", "one layer was captured twice", "mend the capture"),
    "DS208": Check("error", "Inf in states", "the loss becomes NaN", "compute the verifier in float32 or bfloat16"),
    "DS209": Check("error", "rows of states with one value", "a filler was saved as data", _AGAIN),
    "DS210": Check("error", "a whole layer with one value", "the capture wrote nothing", _AGAIN),
    "DS211": Check("warning", "every token is supervised", "the draft learns the user's turns", "mend the mask"),
    "DS212": Check("warning", "padding saved as data", "disk and reading time are wasted", "cut it off"),
    "DS213": Check(
        "error", "a layer's scale far from the same layer's elsewhere", "fc gets inputs it cannot use", _AGAIN
    ),
    "DS214": Check(
        "error", "states equal to another sample's", "the states belong to another request", "generate it again"
    ),
    "DS215": Check("error", "bytes that do not have the CRC-32 they were written with", "flipped bits", _AGAIN),
    "DS216": Check("warning", "token id in the padded part of the vocabulary", "no text has it", "tokenise again"),
    "DS217": Check("warning", "the same conversation twice", "it counts twice, or leaks into validation", "keep one"),
    "DS218": Check("error", "rows of states that repeat the row before", "a stale buffer was saved", _AGAIN),
    "DS219": Check(
        "error", "states of other tokens than the dataset's row", "the row number is the only key", "generate it again"
    ),
    # meaning: the verifier's final norm and lm_head, its tokenizer, and the verifier itself on a few samples
    "DS301": Check(
        "error", "the last state does not predict the next tokens", "the head learns noise", "see who wrote it"
    ),
    "DS302": Check(
        "warning", "the verifier agrees little with the supervised tokens", "the head learns another's answers",
        "let the verifier write the answers (prepare.answers)",
    ),
    "DS303": Check(
        "error", "one sample's last states do not predict its tokens, though others' do",
        "states of another request", "generate it again",
    ),
    "DS304": Check("error", "states shifted by one row", "every target is of another token", "mend the capture"),
    "DS305": Check("error", "final norm already applied", "the targets are normed twice", "mend the capture"),
    "DS306": Check("error", "final norm not applied, though the format says so", "wrong targets", "mend the capture"),
    "DS307": Check("error", "another layer stands in the last place", "wrong targets and inputs", "mend the order"),
    "DS308": Check("error", "states of the neighbouring sample", "every state is another request's", "generate again"),
    "DS309": Check(
        "error", "final norm of the other family (w instead of 1+w, or the reverse)", "the targets are mis-scaled",
        "generate again, or use the verifier that wrote it",
    ),
    "DS310": Check(
        "error", "states of other layers than declared", "a head one layer off accepts nothing",
        "mend the declaration, or set data.boundaries",
    ),
    "DS311": Check("error", "layers out of order", "states feed the wrong input of the draft", "mend the order"),
    "DS312": Check(
        "error", "states that no layer of this verifier gives", "the head learns another model", "use its verifier"
    ),
    "DS313": Check("error", "loss mask shifted by one", "the draft learns the wrong tokens", "mend the mask"),
    "DS314": Check(
        "error", "loss mask that does not fit the sample's turns", "the mask of another sample", "tokenise again"
    ),
    "DS315": Check(
        "warning", "layers that could not be found out", "train needs to know them", "set data.boundaries"
    ),
    "DS316": Check(
        "error", "states of a sample that are not what the verifier computes", "states of another request",
        "generate it again",
    ),
    "DS317": Check(
        "warning", "loss masks that do not follow the verifier's chat template", "training and serving see other turns",
        "see which template made them",
    ),
    # heads: what a server would load
    "DS401": Check("error", "head without readable config or weights", "nothing is served", "export it again"),
    "DS402": Check("error", "tensor missing", "vLLM fills it at random, silently: acceptance 1.0", "export it again"),
    "DS403": Check("error", "tensor that the format does not know", "a server stops, or drops it", "export it again"),
    "DS404": Check("error", "tensor of another shape", "a server stops, or misreads it", "export it again"),
    "DS405": Check("error", "unexpected or mixed dtypes", "a server rounds some of the weights", "export it again"),
    "DS406": Check(
        "error", "draft vocabulary that contradicts itself", "drafts are mapped to wrong tokens", "export it again"
    ),
    "DS407": Check(
        "error", "config key missing whose absence changes the meaning", "servers take different defaults",
        "write the key; export it again",
    ),
    "DS408": Check("error", "config that contradicts weights or verifier", "a server misreads the head", "mend it"),
    "DS409": Check("error", "NaN or Inf in weights", "nothing is accepted", "train again from an earlier checkpoint"),
    "DS410": Check("error", "embedding that is not the verifier's", "the draft reads other tokens", "export it again"),
    "DS411": Check(
        "error", "lm_head rows of other tokens than the draft vocabulary names", "drafts are wrong tokens",
        "mend d2t, or export it again",
    ),
    "DS412": Check("error", "head that computes otherwise than its checkpoint", "less is accepted", "export it again"),
    "DS413": Check("warning", "verifier named by a private path", "others cannot find it", "set export.verifier_name"),
    "DS414": Check(
        "warning", "sliding window that the server reads from its command line", "long contexts are accepted less",
        "start SGLang with --speculative-draft-window-size, the window less 1",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing wrong: where, what was expected, what was found, what to do (the catalogue's cure, or better)."""

    code: str
    where: str
    expected: str
    found: str
    todo: str = ""

    @property
    def severity(self) -> Severity:
        """error or warning, by code."""
        return CATALOGUE[self.code].severity

    @property
    def cure(self) -> str:
        """What to do, as a sentence."""
        text = self.todo or CATALOGUE[self.code].cure
        return text[:1].upper() + text[1:].removesuffix(".") + "."

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON, title and severity included."""
        check = CATALOGUE[self.code]
        return {**asdict(self), "todo": self.cure, "severity": check.severity, "title": check.title}


class DamagedFile(BadInput):
    """A file that cannot be used; `code` says in the catalogue's terms why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
