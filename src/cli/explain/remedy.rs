//! Remedies: the settings that would allow a refused request.

/// Returns the setting to change for a refusal's code, or `None` if only the request can be changed.
pub(super) fn remedy_for_code(code: &str) -> Option<&'static str> {
    Some(match code {
        "model_not_allowed" | "model_not_found" => {
            "add the model to `policy.body.models` or `MODELS`"
        }
        "request_too_large" => "raise `policy.max_body_bytes`",
        "unknown_field" => "let `policy.body.unknown_fields` be `drop` or `pass`",
        "capability_not_granted" => "grant it in `policy.body.capabilities` or `CAPABILITIES`",
        "refused_by_rule" | "policy_error" => "change the rule, in `policy.rules`",
        "turn_budget_exhausted" => "raise `budget.max_turns` or `MAX_TURNS`",
        "token_budget_exhausted" => {
            "raise the limit that the message names: `budget.max_input_tokens`, `budget.max_output_tokens` or `budget.max_total_tokens`"
        }
        "cost_budget_exhausted" => "raise `budget.max_cost_usd` or `MAX_COST_USD`",
        "price_unknown" => {
            "give the model a price, or set in `prices` how models without a price are treated"
        }
        "rate_limited" => {
            "raise `budget.requests_per_minute`, `budget.tokens_per_minute` or `budget.free_calls_per_minute`"
        }
        "too_many_concurrent_requests" => "raise `budget.max_concurrent` or `MAX_CONCURRENT`",
        "deadline_exceeded" => "raise `budget.deadline` or `RUN_DEADLINE_SECONDS`",
        _ => return None,
    })
}
