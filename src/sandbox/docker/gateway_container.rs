//! The container of a run's gateway: started before its sandbox, and ended after it.

use std::time::Duration;

use bollard::container::LogOutput;
use bollard::query_parameters::{
    LogsOptionsBuilder, StartContainerOptions, StopContainerOptionsBuilder,
};
use futures_util::StreamExt;
use tokio::time::timeout;

use super::container::CreatedContainer;
use super::{DockerEngine, REQUEST_TIMEOUT_SECONDS};
use crate::sandbox::spec::OwnerLabels;
use crate::sandbox::spec::docker::gateway_container::{GatewayContainerSpec, container_body};
use crate::sandbox::{SandboxError, gateway_container_name};

/// A gateway's container that has been started.
#[derive(Debug)]
pub struct RunningGatewayContainer {
    docker: DockerEngine,
    container: CreatedContainer,
}

/// Creates and starts it. What is made on the way is left to [`remove_gateway`], also when this future is dropped.
///
/// # Errors
/// The engine, the image or the network is not there, or a gateway of this run is there already.
pub async fn start_gateway(
    docker: &DockerEngine,
    proxy: &GatewayContainerSpec,
    stamp: &OwnerLabels,
) -> Result<RunningGatewayContainer, SandboxError> {
    let image = docker.image_id(&proxy.image).await?;
    let body = container_body(proxy, &image, stamp);
    let container =
        Box::pin(docker.create_replacing_stale(&gateway_container_name(&proxy.run), body, stamp))
            .await?;
    let started =
        docker.client.start_container(container.id(), None::<StartContainerOptions>).await;
    started.map_err(|source| SandboxError::Engine {
        doing: "start the gateway's container",
        source,
    })?;
    Ok(RunningGatewayContainer { docker: docker.clone(), container })
}

/// Removes whatever there is by now of the run's gateway, if it is this owner's.
pub async fn remove_gateway(docker: &DockerEngine, run: &str, stamp: &OwnerLabels, was_cut: bool) {
    if let Some(id) = docker.find_late_creation(&gateway_container_name(run), stamp, was_cut).await
    {
        docker.remove_with_retries(&id).await;
    }
}

impl RunningGatewayContainer {
    /// Waits for its end, and returns how it ended.
    pub async fn wait_for_exit(&self) -> Result<i64, SandboxError> {
        self.container.wait_for_exit().await
    }

    /// Lets it drain, for as long as `grace`, and ends it then.
    ///
    /// # Errors
    /// The engine does not end it.
    pub async fn stop(&self, grace: Duration) -> Result<(), SandboxError> {
        let seconds = i32::try_from(grace.as_secs()).unwrap_or(i32::MAX);
        let options = StopContainerOptionsBuilder::default().t(seconds).build();
        let stop = self.docker.client.stop_container(self.container.id(), Some(options));
        let stopped = timeout(grace + Duration::from_secs(REQUEST_TIMEOUT_SECONDS), stop).await;
        let stopped = stopped.map_err(|_| SandboxError::Silent("stop the gateway's container"))?;
        stopped.map_err(|source| SandboxError::Engine {
            doing: "stop the gateway's container",
            source,
        })
    }

    /// The last that it said, for whoever asks why it ended.
    pub async fn log_tail(&self) -> String {
        let options = LogsOptionsBuilder::default().stdout(true).stderr(true).tail("5").build();
        let mut said = self.docker.client.logs(self.container.id(), Some(options));
        let mut words = String::new();
        while let Ok(Some(Ok(chunk))) = timeout(LOG_TAIL_TIMEOUT, said.next()).await {
            let (LogOutput::StdErr { message }
            | LogOutput::StdOut { message }
            | LogOutput::Console { message }
            | LogOutput::StdIn { message }) = chunk;
            words += &String::from_utf8_lossy(&message);
        }
        words.trim_end().to_owned()
    }
}

/// For what only makes an error better.
const LOG_TAIL_TIMEOUT: Duration = Duration::from_secs(2);
