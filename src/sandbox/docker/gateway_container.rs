//! The container of a run's gateway: started before its sandbox, and ended after it.

use std::time::Duration;

use bollard::container::LogOutput;
use bollard::query_parameters::{
    LogsOptionsBuilder, StartContainerOptions, StopContainerOptionsBuilder,
};
use futures_util::StreamExt;
use tokio::time::timeout;

use super::container::CreatedContainer;
use super::{DockerEngine, REQUEST_TIMEOUT_SECONDS, user_limits};
use crate::sandbox::spec::OwnerLabels;
use crate::sandbox::spec::docker::gateway_container::{GatewayContainerSpec, container_body};
use crate::sandbox::spec::docker::podman::limit_for_podman;
use crate::sandbox::{SandboxError, gateway_container_name};

/// A gateway's container that has been started.
#[derive(Debug)]
pub struct RunningGatewayContainer {
    docker: DockerEngine,
    container: CreatedContainer,
}

/// Creates and starts the container. The caller removes everything with [`remove_gateway`], also after this future was
/// dropped.
///
/// # Errors
/// Returns an error if the engine, the image or the network is missing, or if the run has a gateway already.
pub async fn start_gateway(
    docker: &DockerEngine,
    proxy: &GatewayContainerSpec,
    stamp: &OwnerLabels,
) -> Result<RunningGatewayContainer, SandboxError> {
    let image = docker.image_id(&proxy.image).await?;
    let mut body = container_body(proxy, &image, stamp);
    if docker.is_podman() {
        limit_for_podman(&mut body, user_limits());
    }
    let container =
        Box::pin(docker.create_replacing_stale(&gateway_container_name(&proxy.run), body, stamp))
            .await?;
    let started =
        docker.client.start_container(container.id(), None::<StartContainerOptions>).await;
    started.map_err(docker.failure("start the gateway's container"))?;
    Ok(RunningGatewayContainer { docker: docker.clone(), container })
}

/// Removes the run's gateway container, if it exists and belongs to this owner. `was_cut` states that the start was
/// cut off, so that the container may appear late.
pub async fn remove_gateway(docker: &DockerEngine, run: &str, stamp: &OwnerLabels, was_cut: bool) {
    if let Some(id) = docker.find_late_creation(&gateway_container_name(run), stamp, was_cut).await
    {
        docker.remove_with_retries(&id).await;
    }
}

impl RunningGatewayContainer {
    /// Waits for the container's end, and returns its exit code.
    pub async fn wait_for_exit(&self) -> Result<i64, SandboxError> {
        self.container.wait_for_exit().await
    }

    /// Stops the container: it may drain for `grace`, and is killed afterwards.
    ///
    /// # Errors
    /// Returns an error if the engine does not stop the container.
    pub async fn stop(&self, grace: Duration) -> Result<(), SandboxError> {
        let seconds = i32::try_from(grace.as_secs()).unwrap_or(i32::MAX);
        let options = StopContainerOptionsBuilder::default().t(seconds).build();
        let stop = self.docker.client.stop_container(self.container.id(), Some(options));
        // The engine answers only after the container's end, so its usual time to answer is added to the grace.
        let stopped = timeout(grace + Duration::from_secs(REQUEST_TIMEOUT_SECONDS), stop).await;
        let doing = "stop the gateway's container";
        let stopped = stopped.map_err(|_| self.docker.timeout_error(doing))?;
        stopped.map_err(self.docker.failure(doing))
    }

    /// Returns the container's last five lines of output, to explain an early end.
    pub async fn log_tail(&self) -> String {
        let options = LogsOptionsBuilder::default().stdout(true).stderr(true).tail("5").build();
        let mut log = self.docker.client.logs(self.container.id(), Some(options));
        let mut words = String::new();
        // The engine may keep the stream open, so each read has a timeout.
        while let Ok(Some(Ok(chunk))) = timeout(LOG_TAIL_TIMEOUT, log.next()).await {
            let (LogOutput::StdErr { message }
            | LogOutput::StdOut { message }
            | LogOutput::Console { message }
            | LogOutput::StdIn { message }) = chunk;
            words += &String::from_utf8_lossy(&message);
        }
        words.trim_end().to_owned()
    }
}

/// The time for one chunk of the log. It is short, because the log only improves an error's text.
const LOG_TAIL_TIMEOUT: Duration = Duration::from_secs(2);
