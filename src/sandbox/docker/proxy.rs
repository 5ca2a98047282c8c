//! The container of a run's gateway: started before its sandbox, and ended after it.

use std::time::Duration;

use bollard::container::LogOutput;
use bollard::query_parameters::{
    LogsOptionsBuilder, StartContainerOptions, StopContainerOptionsBuilder,
};
use futures_util::StreamExt;
use tokio::time::timeout;

use super::container::Container;
use super::{ANSWER_SECONDS, Docker};
use crate::sandbox::spec::Stamp;
use crate::sandbox::spec::docker::proxy::{Proxy, create_body};
use crate::sandbox::{Error, proxy_name_of};

/// A gateway's container that has been started.
#[derive(Debug)]
pub struct Running {
    docker: Docker,
    container: Container,
}

/// Creates and starts it. What is made on the way is left to [`tidy_up`], also when this future is dropped.
///
/// # Errors
/// The engine, the image or the network is not there, or a gateway of this run is there already.
pub async fn start(docker: &Docker, proxy: &Proxy, stamp: &Stamp) -> Result<Running, Error> {
    let image = docker.image_id(&proxy.image).await?;
    let body = create_body(proxy, &image, stamp);
    let container = Box::pin(docker.make(&proxy_name_of(&proxy.run), body, stamp)).await?;
    let started =
        docker.client.start_container(container.id(), None::<StartContainerOptions>).await;
    started.map_err(|source| Error::Engine { doing: "start the gateway's container", source })?;
    Ok(Running { docker: docker.clone(), container })
}

/// Removes whatever there is by now of the run's gateway, if it is this owner's.
pub async fn tidy_up(docker: &Docker, run: &str, stamp: &Stamp, was_cut: bool) {
    if let Some(id) = docker.late(&proxy_name_of(run), stamp, was_cut).await {
        docker.tidy_up(&id).await;
    }
}

impl Running {
    /// Waits for its end, and returns how it ended.
    pub async fn wait(&self) -> Result<i64, Error> {
        self.container.wait().await
    }

    /// Lets it drain, for as long as `grace`, and ends it then.
    ///
    /// # Errors
    /// The engine does not end it.
    pub async fn stop(&self, grace: Duration) -> Result<(), Error> {
        let seconds = i32::try_from(grace.as_secs()).unwrap_or(i32::MAX);
        let options = StopContainerOptionsBuilder::default().t(seconds).build();
        let stop = self.docker.client.stop_container(self.container.id(), Some(options));
        let stopped = timeout(grace + Duration::from_secs(ANSWER_SECONDS), stop).await;
        let stopped = stopped.map_err(|_| Error::Silent("stop the gateway's container"))?;
        stopped.map_err(|source| Error::Engine { doing: "stop the gateway's container", source })
    }

    /// The last that it said, for whoever asks why it ended.
    pub async fn last_words(&self) -> String {
        let options = LogsOptionsBuilder::default().stdout(true).stderr(true).tail("5").build();
        let mut said = self.docker.client.logs(self.container.id(), Some(options));
        let mut words = String::new();
        while let Ok(Some(Ok(chunk))) = timeout(LAST_WORDS, said.next()).await {
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
const LAST_WORDS: Duration = Duration::from_secs(2);
