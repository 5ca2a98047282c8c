//! What is left of the budget, in headers that the agent can read.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::budget::Status;

/// Adds a header for each limit that the run has. What open calls hold reserved counts as gone.
pub fn tell(headers: &mut HeaderMap, status: &Status) {
    let mut put = |name: &'static str, left: HeaderValue| {
        headers.insert(HeaderName::from_static(name), left);
    };
    if let Some(left) = status.turns_left {
        put("x-cogni-budget-turns-left", left.into());
    }
    let tokens = [
        ("x-cogni-budget-input-tokens-left", status.input_tokens_left),
        ("x-cogni-budget-output-tokens-left", status.output_tokens_left),
        ("x-cogni-budget-total-tokens-left", status.total_tokens_left),
    ];
    for (name, left) in tokens {
        if let Some(left) = left {
            put(name, left.0.into());
        }
    }
    if let Some(left) = status.cost_left_usd {
        let value = HeaderValue::from_maybe_shared(left.to_string());
        let value = value.expect("a number has no character that a header cannot hold");
        put("x-cogni-budget-cost-left-usd", value);
    }
    if let Some(left) = status.time_left {
        put("x-cogni-budget-seconds-left", left.as_secs().into());
    }
}
