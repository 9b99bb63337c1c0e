"""The tensors of the `glmspec` Triton model, as data.

Names follow what existing clients send: TensorRT-LLM's templates (`sampling_param_*`, `streaming`) and the
older `max_tokens`, `stream`, `stop_words`. Every alias of a field means the same; sending two is refused.
An input that is not listed is refused: by Triton itself, or, where its HTTP endpoints turn it into a request
parameter, by `requests.refuse_unknown`. (Parameters that Triton itself defines, such as `priority`, pass.)
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL_NAME = "glmspec"


@dataclass(frozen=True)
class Field:
    """One thing a request may say. names: the input's name and its aliases. dtype: Triton's. dims: [1] or [-1]."""

    names: tuple[str, ...]
    dtype: str
    dims: tuple[int, ...] = (1,)


INPUTS: dict[str, Field] = {
    "text": Field(("text_input",), "TYPE_STRING"),
    "messages": Field(("messages",), "TYPE_STRING"),  # a JSON list of {"role", "content"}, for the chat template
    "input_ids": Field(("input_ids",), "TYPE_INT32", (-1,)),
    "max_tokens": Field(("max_tokens", "sampling_param_max_tokens"), "TYPE_INT32"),
    "stream": Field(("stream", "streaming"), "TYPE_BOOL"),
    "stop": Field(("stop_words", "sampling_param_stop"), "TYPE_STRING", (-1,)),
    "ignore_eos": Field(("ignore_eos",), "TYPE_BOOL"),
    "temperature": Field(("temperature", "sampling_param_temperature"), "TYPE_FP32"),
    "top_k": Field(("top_k", "sampling_param_top_k"), "TYPE_INT32"),
    "top_p": Field(("top_p", "sampling_param_top_p"), "TYPE_FP32"),
    "min_p": Field(("min_p", "sampling_param_min_p"), "TYPE_FP32"),
    "seed": Field(("seed", "sampling_param_seed"), "TYPE_UINT64"),
    "min_tokens": Field(("min_tokens", "sampling_param_min_tokens"), "TYPE_INT32"),
    "stop_token_ids": Field(("stop_token_ids",), "TYPE_INT32", (-1,)),
    "logit_bias": Field(("logit_bias",), "TYPE_STRING"),  # a JSON object {"token id": bias}
    "logprobs": Field(("logprobs", "sampling_param_logprobs"), "TYPE_INT32"),
    "repetition_penalty": Field(("repetition_penalty",), "TYPE_FP32"),
    "frequency_penalty": Field(("frequency_penalty", "sampling_param_frequency_penalty"), "TYPE_FP32"),
    "presence_penalty": Field(("presence_penalty", "sampling_param_presence_penalty"), "TYPE_FP32"),
    "bad_words": Field(("bad_words",), "TYPE_STRING", (-1,)),
    "return_finish_reason": Field(("return_finish_reason",), "TYPE_BOOL"),
    "return_cumulative_logprob": Field(("return_cumulative_logprob",), "TYPE_BOOL"),
    "exclude_input": Field(("sampling_param_exclude_input_from_output", "exclude_input_in_output"), "TYPE_BOOL"),
    "speculate": Field(("speculate",), "TYPE_BOOL"),
}

# Fields that clients send and that change nothing: their only legal values. (The finish reason is always returned.)
NEUTRAL: dict[str, tuple] = {"exclude_input": (True,)}  # answers never repeat the prompt

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
