"""The tensors of the `glmspec` Triton model, as data.

Names follow what existing clients send: TensorRT-LLM's templates (`sampling_param_*`, `streaming`) and the
older `max_tokens`, `stream`, `stop_words`. Every alias of a field means the same; sending two is refused.
An input that is not listed is refused: by Triton itself, or, where its HTTP endpoints turn it into a request
parameter, by `requests.refuse_unknown`. (Parameters that Triton itself defines, such as `priority`, pass.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from glmspec.runtime.request_table import SETTINGS, Setting

MODEL_NAME = "glmspec"
_NUMPY = {"TYPE_INT32": np.int32, "TYPE_UINT64": np.uint64, "TYPE_BOOL": np.bool_, "TYPE_FP32": np.float32}


@dataclass(frozen=True)
class Field:
    """A tensor of the model. names: its own and, of an input, its aliases. dtype: Triton's. dims: (1,), or (-1,) for
    one of any length."""

    names: tuple[str, ...]
    dtype: str
    dims: tuple[int, ...] = (1,)

    def array(self, values: Iterable[Any]) -> np.ndarray:
        """The tensor that holds the values, [values]: text as UTF-8 bytes, numbers in the field's dtype. Raises as
        Python and numpy do (`AttributeError`, `TypeError`, `ValueError`, `OverflowError`) for what it does not hold."""
        if self.dtype == "TYPE_STRING":
            return np.array([text.encode() for text in values], dtype=np.object_)
        values, dtype = list(values), np.dtype(_NUMPY[self.dtype])
        if dtype.kind in "iu" and any(not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max for value in values):
            raise OverflowError  # numpy below 2 wraps around
        return np.array(values, dtype=dtype)


def _of_setting(name: str, setting: Setting) -> Field:
    names = tuple(alias.format(name) for alias in setting.names)
    return Field(names, setting.kind.triton, (-1,) if setting.kind.many else (1,))


INPUTS: dict[str, Field] = {
    "text": Field(("text_input",), "TYPE_STRING"),
    "messages": Field(("messages",), "TYPE_STRING"),  # a JSON list of {"role", "content"}, for the chat template
    "input_ids": Field(("input_ids",), "TYPE_INT32", (-1,)),
    "stream": Field(("stream", "streaming"), "TYPE_BOOL"),
    **{name: _of_setting(name, setting) for name, setting in SETTINGS.items()},
    "return_finish_reason": Field(("return_finish_reason",), "TYPE_BOOL"),  # without effect: it always is
    "return_cumulative_logprob": Field(("return_cumulative_logprob",), "TYPE_BOOL"),
    # Only true is legal: answers never repeat the prompt.
    "exclude_input": Field(("sampling_param_exclude_input_from_output", "exclude_input_in_output"), "TYPE_BOOL"),
}

# A response is one engine step when streaming, the whole answer otherwise. The last one has a finish_reason.
OUTPUTS: dict[str, Field] = {
    "text_output": Field(("text_output",), "TYPE_STRING"),
    "output_ids": Field(("output_ids",), "TYPE_INT32", (-1,)),
    "finish_reason": Field(("finish_reason",), "TYPE_STRING"),  # "" until the last response
    "num_input_tokens": Field(("num_input_tokens",), "TYPE_INT32"),
    "num_output_tokens": Field(("num_output_tokens",), "TYPE_INT32"),  # so far
    "cumulative_logprob": Field(("cumulative_logprob",), "TYPE_FP32"),  # so far; 0 unless asked for
    # JSON, "" unless log-probabilities are asked for: of every token of this response
    # {"token", "logprob", "top": [[token, logprob], ...]}
    "output_logprobs": Field(("output_logprobs",), "TYPE_STRING"),
    "acceptance_rate": Field(("acceptance_rate",), "TYPE_FP32"),
    "total_accepted_draft_tokens": Field(("total_accepted_draft_tokens",), "TYPE_INT32"),
    "total_draft_tokens": Field(("total_draft_tokens",), "TYPE_INT32"),
    "speculative_decoding": Field(("speculative_decoding",), "TYPE_STRING"),  # JSON, AIPerf's shape
}
