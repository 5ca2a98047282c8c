//! Runs the program of a tool, and bounds its time and its result.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::definition::{ToolDefinition, ToolProgramKind};
use super::exec_request::ToolArguments;
use super::job::{JobCall, JobRunner, ToolJob};
use super::mcp_server::McpServer;
use super::program_error::ToolProgramError;
use super::prometheus::PrometheusClient;
use crate::base::task_group::TaskGroup;
use crate::base::timestamp;

/// The programs of a run's tools.
#[derive(Clone, Default)]
pub struct ToolPrograms {
    /// The runner of tools that are files; `None` if the process makes no sandbox for the run.
    pub jobs: Option<Arc<dyn JobRunner>>,
    /// The tasks of the run.
    pub tasks: TaskGroup,
    /// The client of the server that `core__metrics_query` reads.
    pub metrics: Option<PrometheusClient>,
    /// The servers of the configuration, by their names.
    pub servers: BTreeMap<String, Arc<McpServer>>,
}

impl ToolPrograms {
    /// Runs a tool. The result is JSON. `image` is the id of the image that a person has approved; without it, the image of
    /// the tool's file counts.
    ///
    /// # Errors
    /// Returns an error if the tool fails, takes too long, or returns too much.
    pub async fn run_tool(
        &self,
        (tool, call, image): (&ToolDefinition, &str, Option<String>),
        arguments: &ToolArguments,
        timeout: Duration,
    ) -> Result<String, ToolProgramError> {
        if let ToolProgramKind::Job(job) = &tool.program {
            return self.run_job((job, call, image), arguments, timeout).await;
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
        (job, call, image): (&Arc<ToolJob>, &str, Option<String>),
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
        let image = image.or_else(|| job.image.clone());
        let secret_env = BTreeMap::new();
        let job = jobs.run_job(JobCall { id, job, image, arguments, timeout, secret_env, stop });
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
                // The tool's schema bounds the arguments, so they are small while the query runs.
                Some(metrics) => {
                    metrics.run_query(&arguments.members(), tool.max_result_bytes).await
                }
                None => Err(ToolProgramError::failed("there is no server of metrics")),
            },
            ToolProgramKind::Mcp(pinned) => match self.servers.get(&pinned.server) {
                Some(server) => {
                    server.call_tool(pinned, arguments.text(), tool.max_result_bytes).await
                }
                None => Err(ToolProgramError::failed("there is no such server")),
            },
            ToolProgramKind::Job(_) => Err(ToolProgramError::failed("a job has a sandbox")),
        }
    }
}

fn current_time_json() -> String {
    let now = SystemTime::now();
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let time = timestamp::format_rfc3339_millis(now).to_string();
    json!({"time": time, "unix_seconds": seconds}).to_string()
}
