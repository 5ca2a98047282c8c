//! Response headers that show the agent its remaining budget.

use crate::base::header_lines::HeaderLines;
use crate::llm::budget::BudgetStatus;

/// Adds a header for each limit that the run has. Amounts that open calls hold reserved count as spent.
pub fn insert_budget_headers(fields: &mut HeaderLines, status: &BudgetStatus) {
    let numbers = [
        ("x-cogni-budget-turns-left", status.turns_left),
        ("x-cogni-budget-input-tokens-left", status.input_tokens_left.map(|left| left.0)),
        ("x-cogni-budget-output-tokens-left", status.output_tokens_left.map(|left| left.0)),
        ("x-cogni-budget-total-tokens-left", status.total_tokens_left.map(|left| left.0)),
    ];
    for (name, left) in numbers {
        if let Some(left) = left {
            fields.push_number(name, left);
        }
    }
    if let Some(left) = status.cost_left_usd {
        fields.push_with("x-cogni-budget-cost-left-usd", |text| left.append_to(text));
    }
    if let Some(left) = status.time_left {
        fields.push_number("x-cogni-budget-seconds-left", left.as_secs());
    }
}
