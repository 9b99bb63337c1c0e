"""How large a step an engine may be asked to run, and the run-time ranges that follow.

A profile is a plan of its own: "generation" (blocks and single tokens) and "context" (anything, with chunks of
prompts). They are not two profiles of one engine because a profile's sizes decide how its network is authored: the
indexer's heads are scored in as few goes, and its segments in as few tiles, as the profile allows (keys and scores are
a step's largest tensors, and must stay countable in 32 bits; plugins, which read keys in their pages, need fewer), and
plugins have larger tiles for prompts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from glmspec.core.errors import ConfigError
from glmspec.network.trt_limits import MAX_ELEMENTS, MAX_TOPK

SCORES_AT_ONCE = 2**29  # numbers: 2 GB of index scores, in float32
MAX_ADJUSTED = 1024  # tokens that a request may bias or forbid by name, and as many that may end it
MAX_LOGPROBS = 20  # best tokens whose log-probabilities a request may ask for
MAX_LOGPROBS = 20  # best tokens whose log-probabilities a request may ask for
MAX_TOP_K = 1024  # TensorRT's TopK takes 3840 at most; larger ones cost a sort
GENERATION, CONTEXT = "generation", "context"
Ranges = dict[str, tuple[int, int, int]]  # contract symbol -> least, typical and greatest value


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of one engine directory; every model in it shares them."""

    max_model_len: int  # tokens of one sequence, prompt and output together
    max_num_seqs: int  # sequences running at once
    max_num_batched_tokens: int  # rows of one step
    page_size: int  # context rows in a cache page
    segment_rows: int  # most rows of one sequence that share a gather of index keys
    block_rows: int  # rows a verify block may have: the anchor and the drafts
    pool_pages: int | None = None  # pages that sequences share; None: enough for all of them at their longest

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and value < 1:
                raise ConfigError(f"engine limits: {name}: found {value}, expected at least 1.")
        if self.max_model_len < 2:
            raise ConfigError("engine limits: max_model_len: found 1, expected at least 2: a prompt and an answer.")
        rows, max_blocks = self.max_num_seqs * self.block_rows, self.max_num_batched_tokens // self.block_rows
        if self.max_num_batched_tokens < rows:
            fewer = f", or max_num_seqs of at most {max_blocks}" if max_blocks else ""
            raise ConfigError(
                f"engine limits: max_num_batched_tokens: found {self.max_num_batched_tokens}, "
                f"expected at least {rows}{fewer}: "
                f"max_num_seqs ({self.max_num_seqs}) blocks of {self.block_rows} rows must fit one step."
            )

        if self.pool_pages is not None and self.pool_pages < self.pages_per_sequence:
            raise ConfigError(
                f"--max-cached-tokens: found {self.pool_pages * self.page_size:,} tokens (in pages of "
                f"{self.page_size}), expected at least {self.pages_per_sequence * self.page_size:,}: one sequence of "
                f"{self.max_model_len:,} tokens must fit."
            )

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a sequence of the greatest length."""
        return -(-self.max_model_len // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the caches: those that sequences share, and the null page."""
        return 1 + (self.pool_pages or self.max_num_seqs * self.pages_per_sequence)

    def ring_pages(self, window: int | None) -> int:
        """Pages of the ring in which a sequence's sliding layers keep `window` rows, 0 without a window: a window that
        begins inside a page ends in one more."""
        return min(-(-window // self.page_size) + 1, self.pages_per_sequence) if window else 0

    def num_ring_pages(self, ring_pages: int) -> int:
        """Pages of a ring cache: every sequence's ring, and the null page."""
        return 1 + self.max_num_seqs * ring_pages

    @property
    def table_positions(self) -> int:
        """Rows of a rotary table: a block drafted at the last position reaches beyond the limit."""
        return self.max_model_len + self.block_rows

    def index_topk(self, configured: int) -> int:
        """K of the DSA top-k: never more than the rows a page table can name."""
        k = min(configured, self.pages_per_sequence * self.page_size)
        if k > MAX_TOPK:
            raise ConfigError(f"index_topk: found {k}, expected at most {MAX_TOPK}, the most TensorRT's TopK takes.")
        return k

    def least_pages(self, configured: int) -> int:
        """Pages that a page table must have for the DSA top-k."""
        return -(-self.index_topk(configured) // self.page_size)

    def index_tiles(self, columns: int, profile: str) -> int:
        """In how many tiles the segments of a step are scored by the indexer: the scores, one for a row of a segment
        and row of the longest context, and the keys, so many columns for a segment and row of the longest context, are
        a step's largest tensors, and may be more than TensorRT counts. columns: 1 where keys are read in their pages.
        """
        ranges = self.profiles(0)[profile]
        segment = max(ranges["S"][2], columns)
        context = self.pages_per_sequence * self.page_size
        if segment * context > MAX_ELEMENTS:
            max_context = MAX_ELEMENTS // (segment * self.page_size) * self.page_size
            raise ConfigError(
                f"--max-model-len: found {self.max_model_len:,}, expected at most {max_context:,}: a segment's index "
                f"keys and scores may have {MAX_ELEMENTS:,} elements."
            )
        return -(-ranges["G"][2] // (MAX_ELEMENTS // (segment * context)))

    def row_tiles(self, elements: int, profile: str) -> int:
        """In how many tiles the rows of a step are computed where a tensor has so many elements for each."""
        return -(-self.profiles(0)[profile]["N"][2] // max(1, MAX_ELEMENTS // elements))

    def index_heads(self, heads: int, tiles: int, profile: str) -> int:
        """Heads of the indexer that are scored at once, of a tile of a step's segments."""
        ranges = self.profiles(0)[profile]
        rows = -(-ranges["G"][2] // tiles) * ranges["S"][2]
        return min(heads, max(1, SCORES_AT_ONCE // (rows * self.pages_per_sequence * self.page_size)))

    def profiles(self, k: int, window: int = 0, vocab_size: int | None = None) -> dict[str, Ranges]:
        """The steps an engine is built for: "generation" (blocks and single tokens only) and "context" (any step, with
        chunks of prompts). k: the DSA top-k (0: no indexer). window: of sliding layers (0: none). vocab_size: of the
        verifier, where it is known."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        blocks = seqs * self.block_rows
        segments = seqs + -(-tokens // self.segment_rows)
        sizes = {GENERATION: (blocks, seqs, self.block_rows), CONTEXT: (tokens, segments, self.segment_rows)}
        return {
            profile: self._ranges(k, *rows) | self._acceptance_ranges(vocab_size) | self._ring_ranges(window, rows[0])
            for profile, rows in sizes.items()
        }

    def _acceptance_ranges(self, vocab_size: int | None) -> Ranges:
        """Of the symbols that only acceptance has. A row's adjusted tokens are named by the request or in its sequence;
        there are no more of them than the vocabulary has."""
        rows, named = self.max_num_seqs * self.block_rows, self.table_positions + 2 * MAX_ADJUSTED
        entries = min(rows * min(named, vocab_size or named), MAX_ELEMENTS // 2)
        return {"E": (1, 1, entries), "Z": (1, self.block_rows, rows)}

    def _ranges(self, k: int, rows: int, segments: int, segment_rows: int) -> Ranges:
        """Least, typical and greatest value of every contract symbol."""
        seqs, pages = self.max_num_seqs, self.pages_per_sequence
        least_pages = max(1, -(-k // self.page_size))
        return {
            "N": (1, self.block_rows, rows),
            "R": (1, self.block_rows, seqs * self.block_rows),
            "H": (1, self.block_rows, rows),
            "G": (1, 1, segments),
            "S": (1, min(self.block_rows, segment_rows), segment_rows),
            "M": (least_pages, max(least_pages, pages // 2), pages),
            "X": (2, self.num_pages, self.num_pages),
            "X+1": (3, self.num_pages + 1, self.num_pages + 1),
            "C": (1, self.block_rows, rows),
            "B": (1, 1, seqs),
        }

    def _ring_ranges(self, window: int, rows: int) -> Ranges:
        """Of the symbols that are there only where a layer slides. A sequence fills its ring at most once a step."""
        if not window:
            return {}
        ring_pages = self.ring_pages(window)
        pages, max_rows = self.num_ring_pages(ring_pages), min(rows, self.max_num_seqs * ring_pages * self.page_size)
        return {
            "CR": (1, min(self.block_rows, max_rows), max_rows),
            "XR": (2, pages, pages),
            "XR+1": (3, pages + 1, pages + 1),
        }
