//! The explanation as text for people.

use std::fmt::{self, Display, Formatter};

use super::explanation::{ExplainOutcome, RequestExplanation};
use crate::llm::budget::{BudgetAmount, Tokens};

impl Display for RequestExplanation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let guessed = if self.is_guessed { " (a guess; set it with `--route`)" } else { "" };
        writeln!(f, "{} {}{guessed}", self.method, self.path)?;
        self.write_outcome(f)?;
        let query = self.query.iter().map(|query| format!("  {}", query.as_str()));
        write_section(f, "query string", query)?;
        self.write_headers(f)?;
        self.write_body(f)?;
        write_section(f, "rules that match", self.rules.iter().map(|rule| format!("  {rule}")))?;
        self.write_reserved(f)?;
        match &self.upstream {
            Some(upstream) => writeln!(f, "\nsent upstream\n{}", upstream.trim_end()),
            None => Ok(()),
        }
    }
}

impl RequestExplanation {
    fn write_outcome(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let route = self.route.unwrap_or("none");
        match (&self.refusal, self.outcome) {
            (Some(refusal), _) => {
                writeln!(f, "refused: {} `{}`, route {route}", refusal.status, refusal.code)?;
                writeln!(f, "  the client receives: {}", refusal.message)?;
                let remedy = refusal.remedy.unwrap_or("no setting allows it; change the request");
                writeln!(f, "  to allow it: {remedy}")
            }
            (None, ExplainOutcome::Answered) => {
                writeln!(f, "answered by the gateway, route {route}")
            }
            (None, _) => match &self.model {
                Some(model) => writeln!(f, "admitted: route {route}, model {model}"),
                None => writeln!(f, "admitted: route {route}"),
            },
        }
    }

    fn write_headers(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let lines = self.headers.iter().map(|header| {
            let what = header.what.as_str();
            match &header.value {
                Some(value) => format!("  {what:<11}  {}: {value}", header.name),
                None => format!("  {what:<11}  {}", header.name),
            }
        });
        write_section(f, "headers", lines)
    }

    fn write_body(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let lines = self.body.iter();
        let lines =
            lines.map(|field| format!("  {:<11}  {}: {}", field.what, field.name, field.why));
        write_section(f, "fields of the body that change", lines)
    }

    fn write_reserved(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(BudgetAmount { turns, input, output, cost }) = self.reserved else {
            return Ok(());
        };
        let budget = &self.budget;
        let of = |left: Option<String>| left.map_or("no limit".to_owned(), |left| left + " left");
        let tokens = |left: Option<Tokens>| of(left.map(|left| left.0.to_string()));
        let lines = [
            format!("  turns          {turns} of {}", of(budget.turns_left.map(|n| n.to_string()))),
            format!(
                "  input tokens   {} of {} (at most; the estimate is {})",
                input.0,
                tokens(budget.input_tokens_left),
                self.input_estimate.unwrap_or_default().0
            ),
            format!("  output tokens  {} of {}", output.0, tokens(budget.output_tokens_left)),
            format!(
                "  total tokens   {} of {}",
                (input + output).0,
                tokens(budget.total_tokens_left)
            ),
            format!(
                "  dollars        {cost} of {}",
                of(budget.cost_left_usd.map(|n| n.to_string()))
            ),
        ];
        write_section(f, "reserved", lines.into_iter())
    }
}

/// Writes a heading and its lines, or nothing if there are no lines.
fn write_section(
    f: &mut Formatter<'_>,
    heading: &str,
    lines: impl Iterator<Item = String>,
) -> fmt::Result {
    for (number, line) in lines.enumerate() {
        if number == 0 {
            writeln!(f, "\n{heading}")?;
        }
        writeln!(f, "{line}")?;
    }
    Ok(())
}
