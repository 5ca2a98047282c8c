//! The list of models that an upstream offers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use super::headers::{self, InjectedHeaders, UpstreamRequestHead};
use super::{UpstreamCall, UpstreamClient, UpstreamConfig};
use crate::base::rope::SplicedBytes;
use crate::gateway::run::{RequestId, RunIdentity};
use crate::llm::protocol::GatewayRoute;

/// An error of a request for the upstream's list of models.
#[derive(Debug, thiserror::Error)]
pub enum ModelListError {
    #[error(transparent)]
    Headers(#[from] headers::IdentityHeaderError),
    #[error("the upstream's authorities cannot be loaded")]
    CaFile(#[from] io::Error),
    #[error(transparent)]
    Upstream(#[from] super::UpstreamError),
    #[error("the upstream has not sent its list of models within {} s", MODEL_LIST_TIMEOUT.as_secs())]
    Timeout,
    #[error("the upstream's answer is {0} instead of a list of models")]
    Refused(StatusCode),
    #[error("the upstream's answer is not a list of models")]
    Unreadable,
}

#[derive(Deserialize)]
struct ModelListBody {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
}

/// Requests the ids of all models, in the upstream's order.
///
/// # Errors
/// Returns an error if the upstream is not reached, answers with an error, or sends no list within
/// `MODEL_LIST_TIMEOUT`.
pub async fn list_models(config: &UpstreamConfig) -> Result<Vec<String>, ModelListError> {
    // One timeout over all steps: connecting, the head and the body. The call's own timeouts are far longer.
    let deadline = Instant::now() + MODEL_LIST_TIMEOUT;
    timeout_at(deadline, Box::pin(request_models(config)))
        .await
        .map_err(|_| ModelListError::Timeout)?
}

async fn request_models(config: &UpstreamConfig) -> Result<Vec<String>, ModelListError> {
    // No run stands behind this request, so the identity and the header settings are empty defaults.
    let (upstream, no_settings) = (UpstreamClient::new(config)?, headers::HeaderConfig::default());
    let injected_headers =
        Arc::new(InjectedHeaders::new(config, &RunIdentity::default(), &no_settings)?);
    let request = Request::new(());
    let head = UpstreamRequestHead::new(
        GatewayRoute::Models,
        &request,
        &no_settings,
        injected_headers,
        &RequestId::new(),
    );
    let response = upstream
        .send_call(UpstreamCall {
            head,
            body: SplicedBytes::default(),
            deadline: None,
            begun: Instant::now(),
        })
        .await?;
    if !response.status.is_success() {
        return Err(ModelListError::Refused(response.status));
    }
    // The limit protects the process from an upstream that sends without end.
    let body = Limited::new(response.body, MAX_MODEL_LIST_BYTES).collect().await;
    let body = body.map_err(|_| ModelListError::Unreadable)?.to_bytes();
    let list: ModelListBody =
        serde_json::from_slice(&body).map_err(|_| ModelListError::Unreadable)?;
    Ok(list.data.into_iter().map(|model| model.id).collect())
}

/// The longest time for the whole request. Our choice: every caller can do without the list.
const MODEL_LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// The largest list that is read, in bytes. A thousand models are some hundred kilobytes.
const MAX_MODEL_LIST_BYTES: usize = 4 << 20;
