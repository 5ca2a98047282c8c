//! The result of a run, as the host's program reads it.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::branch_delivery::DeliveryReport;
use super::envelope::{AgentEnvelope, AgentEnvelopeError};
use super::gateway_signals::CallSummary;
use super::quota::QuotaExceededError;
use crate::llm::budget::BudgetAmount;
use crate::sandbox::output::CapturedOutput;
use crate::sandbox::{self, SandboxExit, StopReason};

/// The result of a run: one JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct RunResult {
    pub run_id: String,
    /// True if the program ended by itself with exit code 0 and the result contains its complete standard output.
    pub ok: bool,
    pub exit_code: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_code: Option<RunErrorCode>,
    /// A message for people about the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub stdout: String,
    pub stderr: String,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    /// True if a middle part of `stdout` or `stderr` is left out.
    pub truncated: bool,
    /// The answer of an agent of the catalog.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentEnvelope>,
    /// The outcome of the delivery, if the run had a repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay: Option<DeliveryReport>,
    pub usage: RunUsage,
    pub timings: RunTimings,
}

/// The error code of a run that did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunErrorCode {
    /// The run reached its deadline.
    Timeout,
    /// The kernel killed the program because its memory was used up.
    OomKilled,
    /// The run failed outside of the sandbox.
    Internal,
    /// The program failed, or could not be started.
    ContainerFailed,
    /// The agent reports an error in its answer.
    AgentFailed,
    /// The agent ended with exit code 0, but its standard output has no valid answer.
    InvalidOutput,
    /// The program succeeded, but its standard output is longer than the result keeps.
    OutputTruncated,
    /// The run needed more than its budget.
    BudgetExhausted,
    /// The caller cancelled the run, or the gateway stopped.
    Cancelled,
    /// The workspace exceeded its bound.
    WorkspaceFull,
    /// The run's image is not on this machine.
    ImageNotFound,
    /// A volume of the run is not on this machine.
    VolumeNotFound,
    /// The engine that has to make the sandbox does not answer.
    EngineUnreachable,
    /// The sandbox cannot be made as requested.
    SandboxUnavailable,
    /// The run failed, and none of its calls reached the upstream.
    UpstreamUnreachable,
}

impl RunErrorCode {
    /// Returns the code's name in the result.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::OomKilled => "oom_killed",
            Self::Internal => "internal",
            Self::ContainerFailed => "container_failed",
            Self::AgentFailed => "agent_failed",
            Self::InvalidOutput => "invalid_output",
            Self::OutputTruncated => "output_truncated",
            Self::BudgetExhausted => "budget_exhausted",
            Self::Cancelled => "cancelled",
            Self::WorkspaceFull => "workspace_full",
            Self::ImageNotFound => "image_not_found",
            Self::VolumeNotFound => "volume_not_found",
            Self::EngineUnreachable => "engine_unreachable",
            Self::SandboxUnavailable => "sandbox_unavailable",
            Self::UpstreamUnreachable => "upstream_unreachable",
        }
    }

    /// Returns the message for people, for a run without a more specific message.
    pub fn default_message(self) -> &'static str {
        match self {
            Self::Timeout => "the run has not ended in its time, and was ended",
            Self::OomKilled => "the run has used up its memory",
            Self::Internal => "the run has failed outside of its sandbox",
            Self::ContainerFailed => "the program has failed",
            Self::AgentFailed => "the agent has no answer",
            Self::InvalidOutput => "the agent's standard output is no answer",
            Self::OutputTruncated => "the program has printed more than is kept",
            Self::BudgetExhausted => "the run has asked for more than its budget had left",
            Self::Cancelled => "the run was cancelled",
            Self::WorkspaceFull => "the workspace has outgrown its limit",
            Self::ImageNotFound => "the image is not on this machine",
            Self::VolumeNotFound => "the volume is not on this machine",
            Self::EngineUnreachable => "the container engine does not answer",
            Self::SandboxUnavailable => "the sandbox cannot be made as it is asked for",
            Self::UpstreamUnreachable => {
                "no call of the run has reached the upstream; the log of the gateway says why"
            }
        }
    }

    /// Returns true if the code means that the program was never started, because the machine lacks something that the
    /// program needs.
    pub fn is_before_start(self) -> bool {
        matches!(
            self,
            Self::ImageNotFound
                | Self::VolumeNotFound
                | Self::EngineUnreachable
                | Self::SandboxUnavailable
        )
    }

    /// Returns the code of a run whose sandbox could not be made, or was lost.
    fn of(error: &sandbox::SandboxError) -> Self {
        match error {
            sandbox::SandboxError::NoImage(_) => Self::ImageNotFound,
            sandbox::SandboxError::NoVolume(_) => Self::VolumeNotFound,
            sandbox::SandboxError::NoEngine { .. } => Self::EngineUnreachable,
            sandbox::SandboxError::InvalidSpec { .. }
            | sandbox::SandboxError::HostPath { .. }
            | sandbox::SandboxError::ImageVolume { .. }
            | sandbox::SandboxError::UnsupportedVolume { .. }
            | sandbox::SandboxError::SharedCgroupNamespace { .. }
            | sandbox::SandboxError::AlreadyExists(_)
            | sandbox::SandboxError::LimitsUnavailable(_) => Self::SandboxUnavailable,
            _ => Self::Internal,
        }
    }
}

impl fmt::Display for RunErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for RunErrorCode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// The costs and counts of the run's calls.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RunUsage {
    #[serde(flatten)]
    pub spent: BudgetAmount,
    pub admitted: u64,
    pub refused: u64,
}

/// Durations of the run in milliseconds. The two have different beginnings.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RunTimings {
    /// The time from the request for the sandbox, which follows the start of the gateway, to the start of the program.
    /// Absent if the program was not started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_ms: Option<u64>,
    /// The time from the beginning of the run, before the gateway was started, until the work was delivered and the
    /// run's sandbox and directory were removed.
    pub total_ms: u64,
}

impl RunResult {
    /// Returns the result of a run that was cancelled before its sandbox was made.
    pub(crate) fn cancelled_before_start(run: String) -> Self {
        let parts = RunResultParts {
            ended: Ok(SandboxExit { cause: Some(StopReason::Cancelled), ..SandboxExit::default() }),
            served: Ok(()),
            calls: CallSummary::default(),
            stdout: CapturedOutput::default(),
            stderr: CapturedOutput::default(),
            answer: None,
            relayed: None,
            is_exhausted: false,
            max_workspace: 0,
            elapsed: Duration::ZERO,
        };
        parts.into_result(run)
    }
}

/// The parts from which a result is made.
pub(super) struct RunResultParts {
    pub(super) ended: Result<SandboxExit, sandbox::SandboxError>,
    pub(super) served: anyhow::Result<()>,
    pub(super) calls: CallSummary,
    pub(super) stdout: CapturedOutput,
    pub(super) stderr: CapturedOutput,
    /// The answer on standard output, if the program is an agent.
    pub(super) answer: Option<Result<AgentEnvelope, AgentEnvelopeError>>,
    pub(super) relayed: Option<DeliveryReport>,
    /// True if the budget was spent, so that the gateway admitted no further call.
    pub(super) is_exhausted: bool,
    /// The bound of the workspace in bytes.
    pub(super) max_workspace: u64,
    pub(super) elapsed: Duration,
}

impl RunResultParts {
    pub(super) fn into_result(self, run: String) -> RunResult {
        let error_code = self.error_code(self.answer.as_ref());
        let is_full = error_code == Some(RunErrorCode::WorkspaceFull);
        let full =
            is_full.then(|| QuotaExceededError { max_bytes: self.max_workspace }.to_string());
        let Self { answer: agent, ended, served, calls, stdout, stderr, relayed, elapsed, .. } =
            self;
        // The sandbox's error precedes the gateway's error. Only a run without either has an error message of its own.
        let (ended, error) = match (ended, served) {
            (Err(error), _) => {
                (SandboxExit::default(), Some(format!("{:#}", anyhow::Error::from(error))))
            }
            (Ok(ended), Err(error)) => (ended, Some(format!("{error:#}"))),
            (Ok(mut ended), Ok(())) => {
                let error = ended.not_started.take().or(full).or_else(|| {
                    let last_words = last_stderr_line(&stderr.text);
                    agent_error_message(error_code?, agent.as_ref()?, ended.exit_code, last_words)
                });
                (ended, error)
            }
        };
        RunResult {
            run_id: run,
            ok: error_code.is_none(),
            exit_code: ended.exit_code,
            error_code,
            error,
            truncated: stdout.truncated || stderr.truncated,
            stdout: stdout.text,
            stderr: stderr.text,
            stdout_bytes: stdout.bytes,
            stderr_bytes: stderr.bytes,
            agent: agent.and_then(Result::ok),
            relay: relayed,
            usage: RunUsage {
                spent: calls.spent,
                admitted: calls.admitted,
                refused: calls.refused,
            },
            timings: RunTimings {
                start_ms: ended.start.map(duration_millis),
                total_ms: duration_millis(elapsed),
            },
        }
    }

    /// Returns the error code, or `None` if the run succeeded. The reason for stopping the run takes precedence over
    /// the exit code, because a stopped agent may exit with any code.
    fn error_code(
        &self,
        agent: Option<&Result<AgentEnvelope, AgentEnvelopeError>>,
    ) -> Option<RunErrorCode> {
        let ended = match (&self.ended, &self.served) {
            (Ok(ended), Ok(())) => ended,
            (Ok(_), Err(error)) => {
                return Some(error.downcast_ref().map_or(RunErrorCode::Internal, RunErrorCode::of));
            }
            (Err(error), _) => return Some(RunErrorCode::of(error)),
        };
        // The order of the arms is the order of precedence:
        // 1. the reason for which the runner stopped the run;
        // 2. a spent budget, even if the program ended before the runner could stop it;
        // 3. an error in the agent's answer, explained by the budget or by the upstream if possible;
        // 4. for exit code 0, the state of standard output;
        // 5. for other exit codes, the kernel's, the budget's and the upstream's explanation, in this order.
        match (ended.cause, ended.exit_code) {
            (Some(StopReason::Deadline), _) => Some(RunErrorCode::Timeout),
            (Some(StopReason::Cancelled), _) => Some(RunErrorCode::Cancelled),
            (Some(StopReason::BudgetExhausted), _) => Some(RunErrorCode::BudgetExhausted),
            (Some(StopReason::WorkspaceFull), _) => Some(RunErrorCode::WorkspaceFull),
            // The program ended by itself before the runner stopped it for the spent budget.
            (None, _) if self.is_exhausted => Some(RunErrorCode::BudgetExhausted),
            (None, None) => Some(RunErrorCode::Internal),
            (None, Some(_)) if has_error(agent) && self.calls.is_denied => {
                Some(RunErrorCode::BudgetExhausted)
            }
            (None, Some(_)) if has_error(agent) && self.is_cut_off() => {
                Some(RunErrorCode::UpstreamUnreachable)
            }
            (None, Some(_)) if has_error(agent) => Some(RunErrorCode::AgentFailed),
            // With exit code 0, `oom_killed` does not count: the program has survived the kill of one of its children.
            (None, Some(0)) if self.stdout.truncated => Some(RunErrorCode::OutputTruncated),
            (None, Some(0)) => matches!(agent, Some(Err(_))).then_some(RunErrorCode::InvalidOutput),
            (None, Some(_)) if ended.oom_killed => Some(RunErrorCode::OomKilled),
            (None, Some(_)) if self.calls.is_denied => Some(RunErrorCode::BudgetExhausted),
            (None, Some(_)) if self.is_cut_off() => Some(RunErrorCode::UpstreamUnreachable),
            (None, Some(_)) => Some(RunErrorCode::ContainerFailed),
        }
    }

    /// Returns true if the run has made calls, and none of its calls has reached the upstream.
    fn is_cut_off(&self) -> bool {
        self.calls.admitted > 0 && self.calls.unreached == self.calls.admitted
    }
}

fn has_error(agent: Option<&Result<AgentEnvelope, AgentEnvelopeError>>) -> bool {
    matches!(agent, Some(Ok(envelope)) if envelope.error_message().is_some())
}

/// Returns the message about an agent without an answer. Prefers the agent's own error message.
fn agent_error_message(
    error_code: RunErrorCode,
    agent: &Result<AgentEnvelope, AgentEnvelopeError>,
    exit_code: Option<i64>,
    last_words: Option<&str>,
) -> Option<String> {
    let own = agent.as_ref().ok().and_then(AgentEnvelope::error_message);
    let exit_code = exit_code.unwrap_or_default();
    let after = last_words.map(|words| format!("; its last words: {words}")).unwrap_or_default();
    match (error_code, agent) {
        (RunErrorCode::UpstreamUnreachable, _) => {
            let own = own.map(|own| format!("; the agent says: {own}")).unwrap_or_default();
            Some(format!("{}{own}", error_code.default_message()))
        }
        _ if own.is_some() => own,
        (RunErrorCode::InvalidOutput, Err(error)) => Some(error.to_string()),
        (RunErrorCode::OutputTruncated, _) => {
            Some("the agent has printed more than the result keeps of standard output".to_owned())
        }
        (RunErrorCode::OomKilled, _) => {
            Some("the agent was killed for want of memory; give it more, or less to do".to_owned())
        }
        (RunErrorCode::ContainerFailed, _) if SIGNAL_EXIT_CODES.contains(&exit_code) => {
            let signal = exit_code - 128;
            Some(format!("the agent was ended by signal {signal}, without an answer{after}"))
        }
        (RunErrorCode::ContainerFailed, Ok(_)) => Some(format!(
            "the agent has answered, and then ended with exit code {exit_code}{after}"
        )),
        (RunErrorCode::ContainerFailed, Err(_)) => Some(format!(
            "the agent has ended with exit code {exit_code}, without an answer{after}"
        )),
        _ => None,
    }
}

/// Returns the first characters of the last line of standard error, if the line is not empty.
fn last_stderr_line(stderr: &str) -> Option<&str> {
    let line = stderr.trim_end().lines().next_back()?.trim();
    let end = line.char_indices().nth(MAX_STDERR_LINE_CHARS).map_or(line.len(), |(at, _)| at);
    Some(&line[..end]).filter(|words| !words.is_empty())
}

fn duration_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The exit codes of a program that was ended by a signal: 128 plus the signal's number.
const SIGNAL_EXIT_CODES: RangeInclusive<i64> = 129..=192;

/// The maximum number of characters of a line in an error message (our choice). 300 characters identify a message.
const MAX_STDERR_LINE_CHARS: usize = 300;
