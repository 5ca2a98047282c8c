//! The fields that servers of open models take on chat completions and completions beside the
//! protocol's own fields, by server and provider. Each field shapes the generated text or the
//! report about the text. None of them chooses the server, the model or a storage time.
//!
//! Some fields are left out on purpose, so that admission drops them. Such fields name another
//! model or adapter (`lora_path`), replace the operator's template (`chat_template`), or run code
//! at the server (`custom_logit_processor`).

use super::{FieldRule, RequestField, ValueShape};

/// Returns the field of this name, if any server or provider of open models takes it.
pub(super) fn find(name: &str) -> Option<RequestField> {
    let all = FAMILIES.iter().flat_map(|(_, names)| names.iter());
    let found = all.copied().find(|own| *own == name)?;
    Some(RequestField::new(found, FieldRule::Pass(ValueShape::Any)))
}

/// The servers and providers, with the fields that each takes in the order of their names.
pub(super) const FAMILIES: &[(&str, &[&str])] = &[
    (
        "vLLM",
        &[
            "add_generation_prompt",
            "add_special_tokens",
            "allowed_token_ids",
            "bad_words",
            "continue_final_message",
            "detokenize",
            "documents",
            "guided_choice",
            "guided_decoding_backend",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "guided_whitespace_pattern",
            "ignore_eos",
            "include_stop_str_in_output",
            "length_penalty",
            "min_tokens",
            "prompt_logprobs",
            "return_token_ids",
            "return_tokens_as_token_ids",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "stop_token_ids",
            "structured_outputs",
            "thinking_token_budget",
            "truncate_prompt_tokens",
        ],
    ),
    (
        "SGLang",
        &[
            "ebnf",
            "ignore_eos",
            "json_schema",
            "min_new_tokens",
            "no_stop_trim",
            "regex",
            "separate_reasoning",
            "skip_special_tokens",
            "stop_regex",
            "stop_token_ids",
            "stream_reasoning",
        ],
    ),
    (
        "Ollama",
        &[
            "format",
            "mirostat",
            "mirostat_eta",
            "mirostat_tau",
            "num_ctx",
            "repeat_last_n",
            "repeat_penalty",
            "tfs_z",
            "think",
            "typical_p",
        ],
    ),
    (
        "llama.cpp",
        &[
            "dry_allowed_length",
            "dry_base",
            "dry_multiplier",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "dynatemp_exponent",
            "dynatemp_range",
            "grammar",
            "ignore_eos",
            "json_schema",
            "min_keep",
            "mirostat",
            "mirostat_eta",
            "mirostat_tau",
            "n_keep",
            "n_probs",
            "parse_tool_calls",
            "post_sampling_probs",
            "reasoning_budget",
            "reasoning_format",
            "repeat_last_n",
            "repeat_penalty",
            "samplers",
            "thinking_forced_open",
            "timings_per_token",
            "top_n_sigma",
            "typical_p",
            "xtc_probability",
            "xtc_threshold",
        ],
    ),
    (
        "Mistral",
        &[
            "document_image_limit",
            "document_page_limit",
            "prompt_mode",
            "random_seed",
            "safe_prompt",
        ],
    ),
    ("Groq", &["citation_options", "disable_tool_validation", "documents", "reasoning_format"]),
    (
        "Qwen",
        &[
            "incremental_output",
            "preserve_thinking",
            "result_format",
            "thinking_budget",
            "translation_options",
            "vl_high_resolution_images",
        ],
    ),
    ("Gemini", &["media_resolution", "safety_settings", "thinking_config"]),
    (
        "Cohere, Z.ai, TGI",
        &[
            "citation_quality",
            "do_sample",
            "guideline",
            "safety_mode",
            "strict_tools",
            "top_n_tokens",
        ],
    ),
];
