//! Progress lines for a person who watches a run: its start, each settled call, and its end.

use std::convert::Infallible;
use std::fmt::Write;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::output_renderer::{OpenLineFlag, escape_for_terminal};
use crate::llm::budget::{BudgetAmount, BudgetLedger, BudgetStatus};
use crate::relay::delivery::DeliveryStatus;
use crate::runner::branch_delivery::DeliveryReport;
use crate::runner::{RunPlan, RunResult};

/// Returns the line for the start of a run.
pub(super) fn start_line(plan: &RunPlan) -> String {
    let agent = plan.agent.as_ref().map(|agent| agent.entry.name.as_str());
    let what = agent.or(plan.spec.argv.first().map(String::as_str)).unwrap_or_default();
    format!(
        "run {}: `{what}` in {}, by the driver `{}`, for {} at most\n",
        plan.config.identity.run,
        plan.spec.root,
        plan.driver.name(),
        humantime::format_duration(plan.spec.limits.max_runtime),
    )
}

/// A printer of a line for each settled call.
pub(super) struct ProgressPrinter<W> {
    ledger: Option<Arc<BudgetLedger>>,
    reported: BudgetAmount,
    /// `None` after a write has failed or timed out.
    out: Option<W>,
    open_line: OpenLineFlag,
}

impl<W: AsyncWrite + Unpin> ProgressPrinter<W> {
    pub(super) fn new(ledger: Option<Arc<BudgetLedger>>, out: W, open_line: OpenLineFlag) -> Self {
        let reported = ledger.as_ref().map(|ledger| ledger.spent_amount()).unwrap_or_default();
        Self { ledger, reported, out: Some(out), open_line }
    }

    /// Prints a line after each settled call, as long as the future is polled.
    pub(super) async fn follow_calls(&mut self) -> Infallible {
        while let Some(ledger) = &self.ledger {
            ledger.wait_for_close().await;
            self.print_new_calls().await;
        }
        pending().await
    }

    /// Prints the calls that are not printed yet.
    pub(super) async fn print_new_calls(&mut self) {
        let Some(ledger) = &self.ledger else { return };
        let status = ledger.budget_status();
        let line = call_line(self.reported, &status);
        self.reported = status.spent;
        if !line.is_empty() {
            self.write_lines(&line).await;
        }
    }

    /// Writes lines. A missing or slow reader does not end the run, and only delays it by [`WRITE_TIMEOUT`].
    pub(super) async fn write_lines(&mut self, lines: &str) {
        let Some(out) = &mut self.out else { return };
        let text = format!("{}{}", self.open_line.take_line_break(), escape_for_terminal(lines));
        let written = async {
            out.write_all(text.as_bytes()).await?;
            out.flush().await
        };
        if !matches!(timeout(WRITE_TIMEOUT, written).await, Ok(Ok(()))) {
            // One failure ends the output for good: each further line would cost the same time.
            self.out = None;
        }
    }
}

/// Returns a line about the amount spent since `before`, or an empty text if nothing was spent.
fn call_line(before: BudgetAmount, now: &BudgetStatus) -> String {
    let spent = now.spent.saturating_sub(before);
    if spent == BudgetAmount::default() {
        return String::new();
    }
    // Several calls may have been settled since the last line. A call that generates nothing is not a turn.
    let mut line = match spent.turns {
        0 => "call: ".to_owned(),
        1 => format!("turn {}: ", now.spent.turns),
        many => format!("turns {} to {}: ", now.spent.turns - many + 1, now.spent.turns),
    };
    line += &format_amount(&spent);
    // Only limits that are set have a rest.
    let left = [
        now.turns_left.map(|turns| counted(turns, "turn")),
        now.total_tokens_left.map(|tokens| counted(tokens.0, "token")),
        now.cost_left_usd.map(|cost| format!("${cost}")),
        now.time_left.map(format_seconds),
    ];
    let left: Vec<_> = left.into_iter().flatten().collect();
    if !left.is_empty() {
        let _ = write!(line, "; left: {}", left.join(", "));
    }
    line + "\n"
}

/// Returns the lines for the end of a run.
pub(super) fn end_line(result: &RunResult) -> String {
    let RunResult { exit_code, error_code, error, usage, timings, .. } = result;
    let mut line = error_code.map_or_else(|| "ok".to_owned(), |code| code.to_string());
    if let Some(code) = exit_code.filter(|code| *code != 0) {
        let _ = write!(line, ", exit code {code}");
    }
    if let Some(error) = error {
        let _ = write!(line, ": {error}");
    }
    let time = humantime::format_duration(Duration::from_millis(timings.total_ms));
    let turns = counted(usage.spent.turns, "turn");
    let mut lines = format!("{line}\nafter {time}: {turns}, {}\n", format_amount(&usage.spent));
    if let Some(relayed) = &result.relay {
        lines += &work(relayed);
    }
    lines
}

/// Returns the lines about the work: its branch, the verdict, and its address.
fn work(relayed: &DeliveryReport) -> String {
    let DeliveryReport::Delivered(delivered) = relayed else {
        return match relayed {
            DeliveryReport::NotDelivered { branch: Some(branch), why, .. } => {
                format!("branch {branch}: {why}\n")
            }
            DeliveryReport::NotDelivered { why, .. } => format!("no branch: {why}\n"),
            // The other reports have no branch to name.
            _ => String::new(),
        };
    };
    let DeliveryStatus { branch, step, verdict, reasons, pull_request_url, why, apply, .. } =
        delivered;
    let mut lines =
        format!("branch {branch}: {}", if delivered.is_pushed { "pushed" } else { step });
    if let Some(verdict) = verdict {
        let _ = write!(lines, ", verdict {verdict}");
    }
    lines.push('\n');
    for reason in reasons.iter().chain(why) {
        let _ = writeln!(lines, "    {reason}");
    }
    if let Some(url) = pull_request_url {
        let _ = writeln!(lines, "pull request {url}");
    }
    if let Some(apply) = apply {
        let _ = writeln!(lines, "apply it in a clone: {apply}");
    }
    lines
}

fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn format_amount(amount: &BudgetAmount) -> String {
    let BudgetAmount { input, output, cost, .. } = amount;
    let mut text = format!("{} in, {} out", counted(input.0, "token"), output.0);
    if !cost.is_zero() {
        let _ = write!(text, ", ${cost}");
    }
    text
}

fn format_seconds(time: Duration) -> String {
    humantime::format_duration(Duration::from_secs(time.as_secs())).to_string()
}

/// The time that a reader has to take a line. Our choice.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
