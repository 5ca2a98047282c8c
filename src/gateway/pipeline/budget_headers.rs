//! Response headers that show the agent its remaining budget.

use crate::base::header_lines::HeaderLines;
use crate::llm::budget::BudgetRemainder;

/// Adds a header for each limit that the run has. Amounts that open calls hold reserved count as spent.
pub fn insert_budget_headers(fields: &mut HeaderLines, left: &BudgetRemainder) {
    let numbers = [
        ("x-cogni-budget-turns-left", left.turns),
        ("x-cogni-budget-input-tokens-left", left.input_tokens.map(|left| left.0)),
        ("x-cogni-budget-output-tokens-left", left.output_tokens.map(|left| left.0)),
        ("x-cogni-budget-total-tokens-left", left.total_tokens.map(|left| left.0)),
    ];
    for (name, left) in numbers {
        if let Some(left) = left {
            fields.push_number(name, left);
        }
    }
    if let Some(cost) = left.cost_usd {
        fields.push_with("x-cogni-budget-cost-left-usd", |text| cost.append_to(text));
    }
    if let Some(time) = left.time {
        fields.push_number("x-cogni-budget-seconds-left", time.as_secs());
    }
}
