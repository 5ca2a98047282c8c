//! Runs the program of a tool, and bounds its time and its result.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::definition::{ToolDefinition, ToolProgramKind};
use super::exec_request::ToolArguments;
use super::job::{JobCall, JobRunner, ToolJob};
use super::prometheus::PrometheusClient;
use crate::base::task_group::TaskGroup;
use crate::telemetry::audit::tool_records::ToolOutcome;

/// The programs of a run's tools.
#[derive(Clone, Default)]
pub struct ToolPrograms {
    /// The runner of tools that are files; `None` if the process makes no sandbox for the run.
    pub jobs: Option<Arc<dyn JobRunner>>,
    /// The tasks of the run.
    pub tasks: TaskGroup,
    /// The client of the server that `core__metrics_query` reads.
    pub metrics: Option<PrometheusClient>,
}

/// An error of a tool that ran.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ToolProgramError {
    pub outcome: ToolOutcome,
    /// The stable code that the client, the metrics and the audit log receive.
    pub code: &'static str,
    pub message: String,
}

impl ToolPrograms {
    /// Runs a tool. The result is JSON.
    ///
    /// # Errors
    /// Returns an error if the tool fails, takes too long, or returns too much.
    pub async fn run_tool(
        &self,
        (tool, call): (&ToolDefinition, &str),
        arguments: &ToolArguments,
        timeout: Duration,
    ) -> Result<String, ToolProgramError> {
        if let ToolProgramKind::Job(job) = &tool.program {
            return self.run_job((job, call), arguments, timeout).await;
        }
        let program = self.run_program(tool, arguments);
        let Ok(result) = tokio::time::timeout(timeout, program).await else {
            return Err(ToolProgramError::timed_out(timeout));
        };
        let result = result?;
        if result.len() > tool.max_result_bytes {
            return Err(ToolProgramError::too_large(tool.max_result_bytes));
        }
        Ok(result)
    }

    /// Runs a job in a task of the run, which ends and removes the sandbox even if the caller stops waiting.
    async fn run_job(
        &self,
        (job, call): (&Arc<ToolJob>, &str),
        arguments: &ToolArguments,
        timeout: Duration,
    ) -> Result<String, ToolProgramError> {
        let Some(jobs) = &self.jobs else {
            return Err(ToolProgramError::failed("there is no sandbox for the tool"));
        };
        let stop = CancellationToken::new();
        let _stop_when_dropped = stop.clone().drop_guard();
        let arguments = arguments.text().to_owned();
        let (id, job) = (call.to_owned(), Arc::clone(job));
        let job = jobs.run_job(JobCall { id, job, arguments, timeout, stop });
        self.tasks.run_detached(job).await
    }

    async fn run_program(
        &self,
        tool: &ToolDefinition,
        arguments: &ToolArguments,
    ) -> Result<String, ToolProgramError> {
        match &tool.program {
            ToolProgramKind::CurrentTime => Ok(current_time_json()),
            ToolProgramKind::MetricsQuery => match &self.metrics {
                Some(metrics) => {
                    metrics.run_query(arguments.members(), tool.max_result_bytes).await
                }
                None => Err(ToolProgramError::failed("there is no server of metrics")),
            },
            ToolProgramKind::Job(_) => Err(ToolProgramError::failed("a job has a sandbox")),
        }
    }
}

impl ToolProgramError {
    /// Creates the error of a tool that reports a failure.
    pub fn failed(message: impl Into<String>) -> Self {
        Self { outcome: ToolOutcome::Failed, code: "tool_failed", message: message.into() }
    }

    /// Creates the error of a tool whose time is up.
    pub fn timed_out(timeout: Duration) -> Self {
        let timeout = humantime::format_duration(timeout);
        let message = format!("the tool did not end within {timeout}");
        Self { outcome: ToolOutcome::TimedOut, code: "tool_timeout", message }
    }

    /// Creates the error of a call that a shutdown or an operator has ended.
    pub fn stopped() -> Self {
        let message =
            "the call was stopped: the run ends, or an operator has aborted it".to_owned();
        Self { outcome: ToolOutcome::ShutDown, code: "tool_stopped", message }
    }

    /// Creates the error of a tool whose result is larger than its limit.
    pub fn too_large(limit: usize) -> Self {
        let message = format!("the tool's result is larger than its limit of {limit} bytes");
        Self { outcome: ToolOutcome::OutputTooLarge, code: "tool_output_too_large", message }
    }
}

fn current_time_json() -> String {
    let now = SystemTime::now();
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let time = humantime::format_rfc3339_millis(now).to_string();
    json!({"time": time, "unix_seconds": seconds}).to_string()
}
