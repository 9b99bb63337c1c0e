"""Keys of a config that nothing asked for: known to be harmless, saying nothing, or refused by name.

A config.json may hold keys that change what a model computes (`swiglu_limit`, `sandwich_norm`, a drafter's
`shift_label`), and no tensor shows them: dropped, answers or acceptance are silently wrong. A key that nobody knows
can't be told from one of those, so it is refused, unless its value says nothing: null, false, 0, nothing inside, or a
factor of 1. What no inference looks at is listed here. A feature that every one of our networks has is read instead
where the config is (`Fields.choice`), so that its false is refused too.
"""

from __future__ import annotations

import re
from typing import Any

from glmspec.core.fields import Fields

_HARMLESS = {
    "who wrote the config, and how a library loads it": """
        architectures attention_backend attn_implementation author auto_map base_model base_model_name_or_path comment
        custom_pipelines description dtype has_no_defaults_at_init language library_name license model_id
        model_max_length model_name model_type name name_or_path pipeline_tag processor_class producer tags
        target_model_type target_text_model_type task tokenizer tokenizer_class torch_dtype trust_remote_code
        unsloth_fixed use_cache""",
    "what a library returns, and tasks other than generation": """
        finetuning_task id2label label2id num_labels output_attentions output_hidden_states output_router_logits
        output_scores problem_type return_dict return_dict_in_generate task_specific_params tie_last_hidden_states""",
    "sampling defaults of old configs, which generation_config.json replaced": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
        exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
        num_beam_groups num_beams num_return_sequences remove_invalid_values renormalize_logits repetition_penalty
        suppress_tokens temperature top_k top_p typical_p""",
    "training": """
        auf embed_requires_grad emb_dim gradient_checkpointing initializer_factor initializer_range initializer_std
        lambda_base_decay_ratio lambda_base_start max_anchors num_anchors router_jitter_noise seq_aux""",
    "how other programs divide the work": """
        ep_size expert_parallel_size pretraining_tp tensor_parallel_size tp_size""",
    "sizes that follow from others here, or belong to what is refused where it is switched on": """
        conv_source_rank gru_hidden_dim head_dim max_window_layers num_target_layers original_max_position_embeddings
        pure_draft_prefix_len qk_head_dim sliding_window target_num_hidden_layers""",
    "heads of another kind of drafter, whose tensors would be surplus, and tensors that are there or not": """
        confidence_head_with_markov conv_group_size conv_kernel_size enable_confidence_head has_embed_tokens has_lm_head
        has_own_lm_head markov_head_type markov_rank selector_rank selector_top_k""",
    "storage, which is read with the tensors": """
        compression_config quantization quantization_config""",
    "of a speculators_config: which verifier, and the acceptance of another program": """
        accept_tolerance algorithm proposal_type verifier verifier_accept_k""",
}
HARMLESS = frozenset(name for names in _HARMLESS.values() for name in names.split())
_HARMLESS_NAMES = re.compile(r"_.*|.*(dropout|loss).*|aux_.*_alpha|confidence_head_alpha|(.*_)?version|.*_token_ids?")
_FACTORS = re.compile(r"(.*_)?(scale|scaling|multiplier|factor)")


def refuse_unread(fields: Fields) -> None:
    """Raise `ConfigError` for the first key that nobody read and that may change what is computed."""
    for key, value in fields.values.items():
        if key not in fields.asked and key not in HARMLESS and not _says_nothing(key, value):
            fields.fail(
                key,
                "no such key: nothing here goes by that name, and it may change what is computed. If it does not, "
                "remove it from the config",
            )
    for section in fields.sections.values():
        refuse_unread(section)


def _says_nothing(key: str, value: Any) -> bool:
    neutral = not value or (value == 1 and value is not True and _FACTORS.fullmatch(key))
    return bool(neutral or _HARMLESS_NAMES.fullmatch(key))
