"""Draws the pictures of ARCHITECTURE.md: python scripts/pictures.py writes docs/pictures/*.svg.

Text is what changes, so it is data here, and places are numbers: a picture is a list of boxes, arrows and notes on a
white card, which reads on a light page and on a dark one.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH = 960
INK, PALE, LINE = "#1c2733", "#5b6875", "#8794a1"
BLUE, GREEN, AMBER, GREY, RED = "#dbe9fb", "#dcf2e1", "#fdeecb", "#eef1f4", "#fbdcd9"
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Picture:
    """An SVG that grows: sizes in pixels, y downwards."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height, self._parts = title, height, []

    def text(
        self, x: float, y: float, words: str, size: int = 13, *, bold=False, ink=INK, at="start", mono=False
    ) -> None:
        """A line of words; at: where x is (start, middle, end)."""
        font = "font-family='Menlo, Consolas, monospace'" if mono else FONT
        weight = " font-weight='bold'" if bold else ""
        where = f"x='{x:g}' y='{y:g}' text-anchor='{at}'"
        self._parts.append(f"<text {where} {font} font-size='{size}'{weight} fill='{ink}'>{escape(words)}</text>")

    def box(
        self, x: float, y: float, width: float, height: float, title: str, lines=(), fill=GREY, *, mono=False
    ) -> None:
        """A box with a bold title and lines below it; without lines the title stands in the middle."""
        shape = f"x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='6'"
        self._parts.append(f"<rect {shape} fill='{fill}' stroke='{LINE}'/>")
        middle, top = x + width / 2, y + (21 if lines else height / 2 + 5)
        self.text(middle, top, title, bold=True, at="middle")
        for number, line in enumerate(lines, 1):
            self.text(middle, top + 17 * number, line, 11, ink=PALE, at="middle", mono=mono)

    def arrow(
        self,
        points: list[tuple[float, float]],
        words: str = "",
        *,
        at: tuple[float, float] = (0.0, 0.0),
        dashed=False,
        side="start",
    ) -> None:
        """A line through the points that ends in a head. words: at the place `at`."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self._parts.append(f"<polyline points='{path}' fill='none' stroke='{INK}'{dash} marker-end='url(#head)'/>")
        if words:
            self.text(*at, words, 11, ink=PALE, at=side)

    def zone(self, x: float, y: float, width: float, height: float) -> None:
        """A pale ground behind boxes that belong together."""
        self._parts.append(f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='8' fill='#f4f7fa'/>")

    def svg(self) -> str:
        """The whole file."""
        head = "<path d='M0,0 L8,4 L0,8 z'/>"
        marker = (
            f"<marker id='head' markerWidth='9' markerHeight='8' refX='8' refY='4' orient='auto' fill='{INK}'>{head}"
        )
        return "\n".join(
            (
                f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {self.height}' role='img'>",
                f"<title>{escape(self.title)}</title>",
                f"<defs>{marker}</marker></defs>",
                f"<rect width='{WIDTH}' height='{self.height}' rx='10' fill='white'/>",
                *self._parts,
                "</svg>\n",
            )
        )


FLOORS = (
    ("build", "the commands: engine, bundle, validate, inspect, verify, calibrate, plugins", BLUE),
    ("triton_repo", "model repository, Triton model, launcher, client", BLUE),
    ("runtime", "requests, pages, scheduler, drafters, acceptance, the speculative loop, the executor", GREEN),
    ("convert", "checkpoint folders in, converted checkpoints out", GREEN),
    ("models", "configs, layers, then a file a model: verifier, mtp, dflash, dspark, dflash2, acceptance", AMBER),
    ("plugins", "the ops that TensorRT lacks: reference, layers, kernels", AMBER),
    ("network", "the surface networks are written on; contract, formats, shards, reader, TensorRT", GREY),
    ("core", "errors, progress, JSON fields, files, folders, records, dtypes", GREY),
)


def floors() -> Picture:
    """Who may import whom."""
    picture = Picture("The floors: a folder imports the floors below it", 470)
    picture.box(40, 16, 760, 36, "scripts, tests", fill="white")
    for number, (name, words, fill) in enumerate(FLOORS):
        y = 60 + 48 * number
        picture.box(40, y, 760, 42, "", fill=fill)
        picture.text(58, y + 26, name, 15, bold=True)
        picture.text(176, y + 26, words, 12)
    picture.arrow([(840, 60), (840, 436)])
    picture.text(852, 236, "imports", 13, ink=PALE)
    picture.text(852, 253, "go down", 13, ink=PALE)
    return picture


def step() -> Picture:
    """What one step computes, and which tensors lie between its parts."""
    picture = Picture("A step: draft, choose, verify, accept, append", 560)
    picture.zone(466, 14, 480, 460)
    picture.text(30, 34, "host: lists and small int32 arrays", 12, ink=PALE)
    picture.text(480, 34, "device: networks, and what lies between them", 12, ink=PALE)
    picture.box(30, 50, 270, 60, "scheduler", ("who runs, with how many tokens",))
    picture.box(30, 146, 270, 60, "choose", ("how many drafts are worth verifying",))
    picture.box(30, 262, 270, 60, "pack", ("rows of any mix of sequences",))
    picture.box(30, 470, 270, 60, "append", ("tokens, cached, pages; text; what ends here",))
    picture.box(480, 50, 300, 60, "draft", ("drafter network: appends kept rows, drafts blocks",), BLUE)
    picture.box(480, 262, 300, 60, "verify", ("verifier network: one run over N packed rows",), GREEN)
    picture.box(480, 384, 300, 60, "accept", ("acceptance network on the logits",), AMBER)
    picture.arrow([(300, 80), (480, 80)], "anchors, page tables", at=(390, 72), side="middle")
    picture.arrow([(520, 110), (520, 176), (300, 176)], "draft_ids [B, J],", at=(310, 152))
    picture.text(310, 168, "confidence or margin", 11, ink=PALE)
    picture.arrow([(165, 206), (165, 262)], "drafts a block", at=(173, 238))
    picture.arrow([(300, 292), (480, 292)], "token_ids, positions [N]", at=(390, 284), side="middle")
    picture.text(390, 308, "segments, pages [G, M]", 11, ink=PALE, at="middle")
    picture.arrow([(630, 322), (630, 384)], "logits [R, V], greedy_ids [R]", at=(640, 357))
    picture.arrow([(720, 110), (720, 160), (830, 160), (830, 414), (780, 414)], dashed=True)
    picture.text(712, 132, "q: the probs that drafts", 11, ink=PALE, at="end")
    picture.text(712, 147, "were drawn from", 11, ink=PALE, at="end")
    picture.arrow([(780, 292), (925, 292), (925, 80), (780, 80)])
    picture.text(917, 226, "taps", 11, ink=PALE, at="end")
    picture.text(917, 241, "tap.k [N, D]", 11, ink=PALE, at="end")
    picture.text(917, 256, "next step", 11, ink=PALE, at="end")
    picture.arrow([(520, 444), (520, 500), (300, 500)], "accepted [B], tokens [B, Q]", at=(310, 492))
    picture.arrow([(30, 500), (14, 500), (14, 80), (30, 80)])
    picture.text(30, 548, "the next step begins", 11, ink=PALE)
    return picture


def pages() -> Picture:
    """The pool, two page tables, a ring, the null page."""
    picture = Picture("Pages, rings and the null page", 520)
    picture.text(
        30,
        32,
        "Pool of the verifier's and the drafter's caches: a page id means the same page in every cache",
        13,
        bold=True,
    )
    owners = ("null", "A", "A", "B", "A", "B", "free", "free", "B", "free")
    fills = {"null": RED, "A": BLUE, "B": GREEN, "free": "white"}
    for page, owner in enumerate(owners):
        picture.box(30 + 88 * page, 46, 82, 50, f"page {page}", (owner,), fills[owner])
    picture.text(
        30,
        126,
        "Page 0, the null page, is nobody's: it pads page tables and idle blocks read it. Its rows are zeros.",
        12,
        ink=PALE,
    )
    picture.text(30, 164, "Page tables of a step, a line a segment [G, M]", 13, bold=True)
    for line, (name, fill, table) in enumerate((("sequence A", BLUE, (1, 2, 4)), ("sequence B", GREEN, (3, 5, 8)))):
        y = 178 + 48 * line
        picture.text(30, y + 25, name, 12)
        for column in range(5):
            page = table[column] if column < len(table) else 0
            picture.box(120 + 64 * column, y, 58, 40, str(page), fill=fill if page else RED)
    picture.text(470, 196, "A row at position p lies in page table[p // P], row p mod P.", 12, ink=PALE)
    picture.text(470, 216, "All pages that a request can need are reserved when it is admitted.", 12, ink=PALE)
    picture.text(470, 236, "Rows of rejected drafts lie beyond every visible position", 12, ink=PALE)
    picture.text(470, 256, "until the next rows are written over them.", 12, ink=PALE)
    picture.text(
        30,
        312,
        "A ring: pages of a drafter's sliding layers, of window W, that a sequence owns while it runs",
        13,
        bold=True,
    )
    for page in range(4):
        ordinal = page + 4 if page < 3 else page
        fill = AMBER if ordinal in (4, 5, 6) else GREY
        picture.box(30 + 142 * page, 330, 134, 50, f"ring page {page}", (f"holds page ordinal {ordinal}",), fill)
    picture.arrow([(590, 380), (590, 420), (97, 420), (97, 380)])
    picture.text(
        330,
        438,
        "ordinal o lies in ring page o mod 4: the next one is written over the oldest",
        11,
        ink=PALE,
        at="middle",
    )
    picture.text(612, 346, "ceil(W / P) + 1 pages hold any window of W rows,", 12, ink=PALE)
    picture.text(612, 366, "so a block gathers no more of a long context", 12, ink=PALE)
    picture.text(612, 386, "than of a short one.", 12, ink=PALE)
    picture.text(
        30,
        480,
        "Masks compare absolute positions, which also hides what a page still holds of its former use.",
        12,
        ink=PALE,
    )
    return picture


def op() -> Picture:
    """An op's faces, and where each runs."""
    picture = Picture("An op's three faces, and where each runs", 470)
    picture.box(330, 20, 300, 58, "op", ("name, inputs, outputs, attributes (spec.py)",))
    picture.box(30, 150, 270, 76, "reference", ("a torch function", "the oracle of the other two"), GREEN)
    picture.box(
        345, 150, 270, 76, "layers (native)", ("TensorRT layers, tagged as a region", "in every network"), AMBER
    )
    picture.box(660, 150, 270, 76, "plugins", ("a chain of Triton kernels", "where speed asks for one"), BLUE)
    for x in (165, 480, 795):
        picture.arrow([(480, 78), (480, 112), (x, 112), (x, 150)])
    picture.arrow([(345, 188), (300, 188)])
    picture.text(322, 180, "=", 14, at="middle")
    picture.arrow([(660, 188), (615, 188)])
    picture.text(637, 180, "=", 14, at="middle")
    picture.box(
        30,
        310,
        270,
        94,
        "executor",
        (
            "target cpu, validate's twin, tests",
            "puts the reference in a region's place;",
            "regions=False runs its layers",
        ),
    )
    picture.box(
        345,
        310,
        270,
        94,
        "TensorRT, TensorRT-RTX",
        ("compiles the layers: SM120 here,", "and what a kernel does not take", "(NoPlugin) elsewhere"),
    )
    picture.box(
        660,
        310,
        270,
        94,
        "TensorRT on a GPU",
        ("SM90, SM100, SM103: PTX for the region,", "compiled on any machine;", "tests interpret the kernels"),
    )
    for x in (165, 480, 795):
        picture.arrow([(x, 226), (x, 310)])
    picture.arrow([(420, 226), (420, 268), (250, 268), (250, 310)], dashed=True)
    picture.text(
        30,
        440,
        "Equal: interpreter against reference, reference against layers, layers against Hugging Face's models.",
        12,
        ink=PALE,
    )
    return picture


def weight() -> Picture:
    """A weight from a checkpoint's file to a product."""
    picture = Picture("A weight's life, from a file to a product", 390)
    rows = (
        ("checkpoint folder", "*.safetensors, config.json", "Hugging Face, ModelOpt, compressed-tensors", "white"),
        ("open", "convert: one opening", "kind, config, where each tensor lies", GREEN),
        ("name", "convert/names.py", "which tensors make a weight of the network", GREEN),
        ("recipe, shards", "convert/recipe.py, network/shards.py", "its number format, each rank's part", GREEN),
        ("tasks", "convert/plan.py, writer.py", "read, quantize, divide, write: any order", GREEN),
        ("rank's file", "rank*.safetensors, sealed record", "what this rank holds, hashed", "white"),
        ("input", "network/config.py, models", "declared by the same rule the writer used", AMBER),
        ("bound", "runtime/model.py", "read once, bound to each network input", BLUE),
        ("product", "models/layers/quantized.py", "multiplied as codes, scaled after", BLUE),
    )
    for number, (title, where, words, fill) in enumerate(rows):
        column, line = number % 3, number // 3
        x, y = 30 + 315 * column, 24 + 116 * line
        picture.box(x, y, 270, 70, title, (where, words), fill)
        if column < 2:
            picture.arrow([(x + 270, y + 35), (x + 315, y + 35)])
        elif line < 2:
            picture.arrow([(x + 135, y + 70), (x + 135, y + 93), (165, y + 93), (165, y + 116)])
    picture.text(
        30,
        370,
        "Engines hold no weights. NetworkConfig decides what a rank's file holds of a weight and, "
        "by the same function, what its network takes.",
        12,
        ink=PALE,
    )
    return picture


PICTURES = {"floors": floors, "step": step, "pages": pages, "op": op, "weight": weight}


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
