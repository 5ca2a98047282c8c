//! What came of a run, as its host reads it.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::branch_delivery::DeliveryReport;
use super::envelope::{AgentEnvelope, AgentEnvelopeError};
use super::quota::QuotaExceededError;
use super::run_gateway::CallSummary;
use crate::llm::budget::BudgetAmount;
use crate::sandbox::output::CapturedOutput;
use crate::sandbox::{self, SandboxExit, StopReason};

/// The result of a run: one JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct RunResult {
    pub run_id: String,
    /// The program ended by itself, with exit code 0, and all of its standard output is here.
    pub ok: bool,
    pub exit_code: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_code: Option<RunErrorCode>,
    /// What went wrong outside of the sandbox, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub stdout: String,
    pub stderr: String,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    /// Something is left out in the middle of `stdout` or `stderr`.
    pub truncated: bool,
    /// What an agent of the catalog has answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentEnvelope>,
    /// What has become of its commits, where it had a repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay: Option<DeliveryReport>,
    pub usage: RunUsage,
    pub timings: RunTimings,
}

/// Why a run is not ok.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunErrorCode {
    /// It ran for as long as it may.
    Timeout,
    /// The kernel ended it for want of memory.
    OomKilled,
    /// It failed outside of the sandbox.
    Internal,
    /// Its program failed, or could not be started.
    ContainerFailed,
    /// The agent says that it has no answer.
    AgentFailed,
    /// The agent ended as if it were ok, and its standard output is no answer.
    InvalidOutput,
    /// It was ok, but not all of its standard output is here.
    OutputTruncated,
    /// It asked for more than its budget had.
    BudgetExhausted,
    /// Somebody ended it.
    Cancelled,
    /// Its workspace held more than it may.
    WorkspaceFull,
    /// Its image is not on this machine.
    ImageNotFound,
    /// A volume that it names is not on this machine.
    VolumeNotFound,
    /// The engine that is to make its sandbox does not answer.
    EngineUnreachable,
    /// Its sandbox cannot be made as it is asked for.
    SandboxUnavailable,
    /// It failed, and none of its calls reached the upstream.
    UpstreamUnreachable,
}

impl RunErrorCode {
    /// As in the result.
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

    /// For people, where there is nothing better to say.
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

    /// Returns whether the program was never started, because something that it needs is not on this machine.
    pub fn is_before_start(self) -> bool {
        matches!(
            self,
            Self::ImageNotFound
                | Self::VolumeNotFound
                | Self::EngineUnreachable
                | Self::SandboxUnavailable
        )
    }

    /// The code of a run whose sandbox could not be made, or was lost.
    fn of(error: &sandbox::SandboxError) -> Self {
        match error {
            sandbox::SandboxError::NoImage(_) => Self::ImageNotFound,
            sandbox::SandboxError::NoVolume(_) => Self::VolumeNotFound,
            sandbox::SandboxError::NoEngine { .. } => Self::EngineUnreachable,
            sandbox::SandboxError::Spec { .. }
            | sandbox::SandboxError::HostPath { .. }
            | sandbox::SandboxError::ImageVolume { .. }
            | sandbox::SandboxError::Volume { .. }
            | sandbox::SandboxError::Taken(_)
            | sandbox::SandboxError::Unlimited(_) => Self::SandboxUnavailable,
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

/// What the run's calls came to.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RunUsage {
    #[serde(flatten)]
    pub spent: BudgetAmount,
    pub admitted: u64,
    pub refused: u64,
}

/// Milliseconds since the deadline was armed.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RunTimings {
    /// Until the program was started; none where it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_ms: Option<u64>,
    /// Until nothing was left of the run.
    pub total_ms: u64,
}

/// All that a result is made of.
pub(super) struct RunResultParts {
    pub(super) ended: Result<SandboxExit, sandbox::SandboxError>,
    pub(super) served: anyhow::Result<()>,
    pub(super) calls: CallSummary,
    pub(super) stdout: CapturedOutput,
    pub(super) stderr: CapturedOutput,
    /// What stands on the standard output of a program that is an agent.
    pub(super) answer: Option<Result<AgentEnvelope, AgentEnvelopeError>>,
    pub(super) relayed: Option<DeliveryReport>,
    /// No further call would have been let through.
    pub(super) is_exhausted: bool,
    /// What its workspace may hold.
    pub(super) max_workspace: u64,
    pub(super) elapsed: Duration,
}

impl RunResultParts {
    pub(super) fn into_result(self, run: String) -> RunResult {
        let error_code = self.error_code(self.answer.as_ref());
        let is_full = error_code == Some(RunErrorCode::WorkspaceFull);
        let full = is_full.then(|| QuotaExceededError { most: self.max_workspace }.to_string());
        let Self { answer: agent, ended, served, calls, stdout, stderr, relayed, elapsed, .. } =
            self;
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

    /// Why the run was ended comes before how it took it: an agent may leave with any exit code when it is told to.
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
        match (ended.cause, ended.exit_code) {
            (Some(StopReason::Deadline), _) => Some(RunErrorCode::Timeout),
            (Some(StopReason::Cancelled), _) => Some(RunErrorCode::Cancelled),
            (Some(StopReason::Budget), _) => Some(RunErrorCode::BudgetExhausted),
            (Some(StopReason::Workspace), _) => Some(RunErrorCode::WorkspaceFull),
            // It was quicker than we were.
            (None, _) if self.is_exhausted => Some(RunErrorCode::BudgetExhausted),
            (None, None) => Some(RunErrorCode::Internal),
            (None, Some(_)) if has_error(agent) && self.calls.is_denied => {
                Some(RunErrorCode::BudgetExhausted)
            }
            (None, Some(_)) if has_error(agent) && self.is_cut_off() => {
                Some(RunErrorCode::UpstreamUnreachable)
            }
            (None, Some(_)) if has_error(agent) => Some(RunErrorCode::AgentFailed),
            // A program that lived on after the kernel had killed one of its children has dealt with it.
            (None, Some(0)) if self.stdout.truncated => Some(RunErrorCode::OutputTruncated),
            (None, Some(0)) => matches!(agent, Some(Err(_))).then_some(RunErrorCode::InvalidOutput),
            (None, Some(_)) if ended.oom_killed => Some(RunErrorCode::OomKilled),
            (None, Some(_)) if self.calls.is_denied => Some(RunErrorCode::BudgetExhausted),
            (None, Some(_)) if self.is_cut_off() => Some(RunErrorCode::UpstreamUnreachable),
            (None, Some(_)) => Some(RunErrorCode::ContainerFailed),
        }
    }

    /// Whether the run has made calls, and none of them has reached the upstream.
    fn is_cut_off(&self) -> bool {
        self.calls.admitted > 0 && self.calls.unreached == self.calls.admitted
    }
}

fn has_error(agent: Option<&Result<AgentEnvelope, AgentEnvelopeError>>) -> bool {
    matches!(agent, Some(Ok(envelope)) if envelope.error_message().is_some())
}

/// Why an agent has no answer, in its own words where it has any.
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

/// The last line of standard error, as far as it is short.
fn last_stderr_line(stderr: &str) -> Option<&str> {
    let line = stderr.trim_end().lines().next_back()?.trim();
    let end = line.char_indices().nth(MAX_STDERR_LINE_CHARS).map_or(line.len(), |(at, _)| at);
    Some(&line[..end]).filter(|words| !words.is_empty())
}

fn duration_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Exit codes that tell of a signal.
const SIGNAL_EXIT_CODES: RangeInclusive<i64> = 129..=192;

/// Enough to recognise a message.
const MAX_STDERR_LINE_CHARS: usize = 300;
