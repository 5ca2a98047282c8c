//! A few lines for whoever watches a run: what begins, each call as it is settled, and how it ends.

use std::convert::Infallible;
use std::fmt::Write;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::shown::{Place, harmless};
use crate::budget::{Amount, Ledger, Status};
use crate::delivery::Delivered;
use crate::runner::delivery::Relayed;
use crate::runner::{Order, RunResult};

/// What begins.
pub(super) fn beginning(order: &Order) -> String {
    let agent = order.agent.as_ref().map(|agent| agent.entry.name.as_str());
    let what = agent.or(order.spec.argv.first().map(String::as_str)).unwrap_or_default();
    format!(
        "run {}: `{what}` in {}, by the driver `{}`, for {} at most\n",
        order.config.identity.run,
        order.spec.root,
        order.driver.name(),
        humantime::format_duration(order.spec.limits.max_runtime),
    )
}

/// Writes a line for each call.
pub(super) struct Follower<W> {
    ledger: Option<Arc<Ledger>>,
    told: Amount,
    /// `None` once nobody looks any more.
    out: Option<W>,
    place: Place,
}

impl<W: AsyncWrite + Unpin> Follower<W> {
    pub(super) fn new(ledger: Option<Arc<Ledger>>, out: W, place: Place) -> Self {
        let told = ledger.as_ref().map(|ledger| ledger.spent()).unwrap_or_default();
        Self { ledger, told, out: Some(out), place }
    }

    /// For as long as it is polled.
    pub(super) async fn follow(&mut self) -> Infallible {
        while let Some(ledger) = &self.ledger {
            ledger.closed().await;
            self.tell().await;
        }
        pending().await
    }

    /// What is not told yet.
    pub(super) async fn tell(&mut self) {
        let Some(ledger) = &self.ledger else { return };
        let status = ledger.status();
        let line = call(self.told, &status);
        self.told = status.spent;
        if !line.is_empty() {
            self.write(&line).await;
        }
    }

    /// Nobody may be looking, which is no reason to end the run, or to wait for long.
    pub(super) async fn write(&mut self, lines: &str) {
        let Some(out) = &mut self.out else { return };
        let text = format!("{}{}", self.place.new_line(), harmless(lines));
        let written = async {
            out.write_all(text.as_bytes()).await?;
            out.flush().await
        };
        if !matches!(timeout(PATIENCE, written).await, Ok(Ok(()))) {
            self.out = None;
        }
    }
}

/// What has been spent since; nothing, if that is nothing.
fn call(before: Amount, now: &Status) -> String {
    let spent = now.spent.saturating_sub(before);
    if spent == Amount::default() {
        return String::new();
    }
    let mut line = match spent.turns {
        0 => "call: ".to_owned(),
        1 => format!("turn {}: ", now.spent.turns),
        many => format!("turns {} to {}: ", now.spent.turns - many + 1, now.spent.turns),
    };
    line += &amount(&spent);
    let left = [
        now.turns_left.map(|turns| counted(turns, "turn")),
        now.total_tokens_left.map(|tokens| counted(tokens.0, "token")),
        now.cost_left_usd.map(|cost| format!("${cost}")),
        now.time_left.map(whole_seconds),
    ];
    let left: Vec<_> = left.into_iter().flatten().collect();
    if !left.is_empty() {
        let _ = write!(line, "; left: {}", left.join(", "));
    }
    line + "\n"
}

/// How it ended.
pub(super) fn ending(result: &RunResult) -> String {
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
    let mut lines = format!("{line}\nafter {time}: {turns}, {}\n", amount(&usage.spent));
    if let Some(relayed) = &result.relay {
        lines += &work(relayed);
    }
    lines
}

/// What has become of the work: its branch, the verdict, and where it can be looked at.
fn work(relayed: &Relayed) -> String {
    let Relayed::Delivered(delivered) = relayed else {
        return match relayed {
            Relayed::Not { branch: Some(branch), why, .. } => format!("branch {branch}: {why}\n"),
            Relayed::Not { why, .. } => format!("no branch: {why}\n"),
            _ => String::new(),
        };
    };
    let Delivered { branch, step, verdict, reasons, pull_request_url, why, apply, .. } = delivered;
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

fn amount(amount: &Amount) -> String {
    let Amount { input, output, cost, .. } = amount;
    let mut text = format!("{} in, {} out", counted(input.0, "token"), output.0);
    if !cost.is_zero() {
        let _ = write!(text, ", ${cost}");
    }
    text
}

fn whole_seconds(time: Duration) -> String {
    humantime::format_duration(Duration::from_secs(time.as_secs())).to_string()
}

/// For a line to be taken by whoever looks.
const PATIENCE: Duration = Duration::from_secs(2);
